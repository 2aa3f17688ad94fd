"""Measures possible reasons for slow servers: their speed, each direction of the links between them, and their clocks.

The check runs after the link benchmark, which measures both directions at once. All workers call `check_servers`. They
wait for each other between its steps, so that the links carry nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.elastic import process_groups
from pipeplan_measure.pair_schedule import OneWay, ServerCheck

WORK_S = 1.0
"""Seconds for which every worker computes."""
WIDTH = {"cpu": 512, "cuda": 4096}
"""Rows and columns of the matrices that a worker multiplies, by the kind of its device."""
FIRST_BYTES, MOST_BYTES = 1 << 18, 1 << 26
LONG_S = 0.1
"""If a message takes longer, no larger message is sent."""
ECHOES = 20
"""Number of round trips for comparing two clocks. The fastest round trip counts."""


def check_servers(places: Sequence[str], device: torch.device, group: dist.ProcessGroup) -> ServerCheck:
    """Measure the servers of the workers in a Gloo group. `places`: an id of every worker's server.

    The result is complete at rank 0 only.
    """
    first = [places.index(place) for place in dict.fromkeys(places)]
    process_groups.wait_for(group)
    compute = process_groups.gather_at(_compute_s(device), 0, group, float)
    one_way: list[OneWay] = []
    for sender, receiver in _directions(first):
        process_groups.wait_for(group)
        one_way += _rate_of(sender, receiver, group)
    process_groups.wait_for(group)
    ahead = _clock_s(first, group)
    found = process_groups.gather_at(one_way, 0, group, list[OneWay])
    return ServerCheck(tuple(compute), tuple(one for each in found for one in each), tuple(ahead))


def _directions(first: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Both directions between each server and the next, and between the last and the first."""
    ring = list(zip(first, [*first[1:], first[0]], strict=True))
    for one, other in ring if len(first) > 2 else ring[:-1]:
        yield one, other
        yield other, one


def _compute_s(device: torch.device) -> float:
    """Mean time of a product of two matrices. A median would hide other programs that use the processor at times."""
    backend, width = backend_of(device), WIDTH[device.type]
    one = torch.rand(width, width, device=device)
    torch.mm(one, one)
    backend.synchronise(device)
    count, began = 0, time.perf_counter()
    while time.perf_counter() < began + WORK_S:
        torch.mm(one, one)
        backend.synchronise(device)
        count += 1
    return (time.perf_counter() - began) / count


def _rate_of(sender: int, receiver: int, group: dist.ProcessGroup) -> list[OneWay]:
    """The rate of messages from one rank to another, at the sender. The receiver answers each message with a number."""
    answer, size = torch.zeros(1), FIRST_BYTES
    if dist.get_rank() == receiver:
        while length := int(_received(torch.zeros(1, dtype=torch.int64), sender, group)):
            _received(torch.empty(length // 4), sender, group)
            dist.send(answer, sender, group=group)
        return []
    if dist.get_rank() != sender:
        return []
    rate = 0.0
    while size <= MOST_BYTES:
        dist.send(torch.tensor([size]), receiver, group=group)
        message = torch.zeros(size // 4)
        began = time.perf_counter()
        dist.send(message, receiver, group=group)
        dist.recv(answer, receiver, group=group)
        seconds = time.perf_counter() - began
        rate, size = size / seconds, 2 * size
        if seconds > LONG_S:
            break
    dist.send(torch.tensor([0]), receiver, group=group)
    return [OneWay(sender, receiver, rate)]


def _clock_s(first: Sequence[int], group: dist.ProcessGroup) -> list[float]:
    """Seconds by which the clock of each server is ahead of the clock of rank 0; complete at rank 0."""
    ahead, rank = [0.0], dist.get_rank()
    for other in first[1:]:
        offsets: list[tuple[float, float]] = []
        for _ in range(ECHOES):
            if rank == 0:
                sent = time.time()
                dist.send(torch.zeros(1, dtype=torch.float64), other, group=group)
                there = float(_received(torch.zeros(1, dtype=torch.float64), other, group))
                back = time.time()
                offsets.append((back - sent, there - (sent + back) / 2))
            elif rank == other:
                _received(torch.zeros(1, dtype=torch.float64), 0, group)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0, group=group)
        ahead.append(min(offsets, default=(0.0, 0.0))[1])
        process_groups.wait_for(group)
    return ahead


def _received(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    dist.recv(tensor, source, group=group)
    return tensor
