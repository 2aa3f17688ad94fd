"""Two ends of a link in one process: messages that are expected and not yet, small and large, and an end that goes."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipeplan_launch.comm.ring_buffer import MessageTensor, SlotPool, tensor_offsets
from pipeplan_launch.comm.shared_memory import AT_ONCE_BYTES, LocalListener, SharedMemoryChannel, can_connect_locally

SIZES = (1, 1000, AT_ONCE_BYTES // 8 + 1)
"""Numbers of 8 bytes; the last is more than is written at once."""


def pair(timeout_s: float = 20.0) -> tuple[SharedMemoryChannel, SharedMemoryChannel]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return SharedMemoryChannel(one, 1, timeout_s), SharedMemoryChannel(other, 0, timeout_s)


def message(numbers: int, value: int) -> list[Tensor]:
    return [torch.full((numbers,), value, dtype=torch.int64), torch.tensor([True, False])]


class Receiver:
    """Offers slots at one end and takes what comes."""

    def __init__(self, link: SharedMemoryChannel) -> None:
        self.link, self.slots, self.offered = link, SlotPool(), {}

    def offer(self, minibatch: int, numbers: int) -> None:
        wires = [MessageTensor((numbers,), torch.int64), MessageTensor((2,), torch.bool)]
        size = tensor_offsets([wire.size for wire in wires])[-1]
        self.offered[minibatch] = (self.slots.take(size), wires)
        self.link.offer((0, minibatch), self.offered[minibatch][0], size)

    def take(self, minibatch: int) -> list[Tensor]:
        self.link.wait_for((0, minibatch))
        return self.slots.tensors(*self.offered.pop(minibatch))


@pytest.mark.parametrize("numbers", SIZES)
@pytest.mark.parametrize("expected", [True, False])
def test_messages_arrive(numbers: int, expected: bool) -> None:
    here, there = pair()
    receiver = Receiver(there)
    for minibatch in range(6):
        if expected:
            receiver.offer(minibatch, numbers)
        sending = here.send((0, minibatch), message(numbers, minibatch))
        if not expected:
            assert not sending.done
            receiver.offer(minibatch, numbers)
        number, flags = receiver.take(minibatch)
        assert number.tolist() == [minibatch] * numbers
        assert flags.tolist() == [True, False]
        here.settle(sending)
        assert not sending.tensors, "what has left is let go"


@pytest.mark.parametrize("numbers", SIZES)
def test_offers_and_messages_in_any_order(numbers: int) -> None:
    here, there = pair()
    receiver = Receiver(there)
    receiver.offer(3, numbers)
    sendings = [here.send((0, minibatch), message(numbers, minibatch)) for minibatch in (3, 1, 2)]
    for minibatch in (1, 2):
        receiver.offer(minibatch, numbers)
    for minibatch in (2, 3, 1):
        assert receiver.take(minibatch)[0].tolist() == [minibatch] * numbers
    for sending in sendings:
        here.settle(sending)


def test_both_directions_at_once() -> None:
    here, there = pair()
    ends = [(here, Receiver(here)), (there, Receiver(there))]
    seen: dict[int, list[int]] = {}

    def work(end: int) -> None:
        link, receiver = ends[end]
        for minibatch in range(20):
            receiver.offer(minibatch, 100_000)
            sending = link.send((0, minibatch), message(100_000, minibatch))
            seen.setdefault(end, []).append(int(receiver.take(minibatch)[0][-1]))
            link.settle(sending)

    threads = [threading.Thread(target=work, args=(end,)) for end in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == {0: list(range(20)), 1: list(range(20))}


def closed(link: SharedMemoryChannel) -> None:
    link._socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("numbers", SIZES)
def test_an_end_that_is_gone(numbers: int) -> None:
    here, there = pair()
    unexpected = here.send((0, 0), message(numbers, 0))
    receiver = Receiver(there)
    receiver.offer(5, numbers)
    closed(here)
    with pytest.raises(ConnectionError, match="closed by peer"):
        receiver.take(5)
    with pytest.raises(ConnectionError, match="closed by peer"):
        here.settle(unexpected)


def test_what_came_before_the_end_is_still_taken() -> None:
    here, there = pair()
    receiver = Receiver(there)
    receiver.offer(0, 3)
    here.settle(here.send((0, 0), message(3, 4)))
    closed(here)
    assert receiver.take(0)[0].tolist() == [4, 4, 4]


@pytest.mark.parametrize("wait", [lambda link: link.wait_for((0, 0)), lambda link: link.settle(link.send((0, 0), []))])
def test_an_end_that_is_silent(wait: Callable[[SharedMemoryChannel], None]) -> None:
    here, _other = pair(timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"timed out after 0.05 s"):
        wait(here)


def test_a_message_of_another_size_is_an_error() -> None:
    here, there = pair()
    Receiver(there).offer(0, 3)
    with pytest.raises(OSError, match="192 bytes where 128 were expected"):
        here.settle(here.send((0, 0), message(9, 0)))


def test_three_workers_find_each_other() -> None:
    doors = [LocalListener() for _ in range(3)]
    addresses = {rank: door.address for rank, door in enumerate(doors)}
    assert all(can_connect_locally(addresses[0], address) for address in addresses.values())
    found: dict[int, dict[int, SharedMemoryChannel]] = {}

    def knock(rank: int) -> None:
        others = {peer: address for peer, address in addresses.items() if peer != rank}
        found[rank] = doors[rank].connect(rank, others, 20.0)

    threads = [threading.Thread(target=knock, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {rank: set(links) for rank, links in found.items()} == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}
    receiver = Receiver(found[2][0])
    receiver.offer(0, 3)
    found[0][2].send((0, 0), message(3, 8))
    assert receiver.take(0)[0].tolist() == [8, 8, 8]


def test_other_machines_are_not_near() -> None:
    door = LocalListener()
    machine, _, name = door.address.rpartition("/")
    assert can_connect_locally(door.address, f"{machine}/000ff")
    assert not can_connect_locally(door.address, f"other/{name}")
    assert not can_connect_locally(door.address, "")


def test_no_room_for_another_open_file_is_said() -> None:
    here, there = pair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    Receiver(there).offer(0, 3)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(OSError, match="Too many open files"):
            here.send((0, 0), message(3, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
