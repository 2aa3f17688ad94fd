"""Averages over replicas, in one process and with a stand-in for the network; and messages between stages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from toy_workers import Toy, run_toy

from pipeplan_launch.comm import buckets, p2p
from pipeplan_launch.comm.buckets import UpdateGroup
from pipeplan_launch.comm.gradient_allreduce import GradientReducer, average_buffers
from pipeplan_launch.comm.p2p import MessageTensor, Transport
from pipeplan_launch.devices.backend import Lane
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.communication_order import Direction


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


class MarkingStreams:
    """Streams whose marks count the gradients that the backward pass has made so far."""

    def __init__(self) -> None:
        self.made, self.after = 0, -1

    def mark(self) -> int:
        return self.made

    @contextmanager
    def beside(self, lane: Lane, *after: int) -> Iterator[None]:
        (self.after,) = after
        yield


def test_in_the_one_order_a_bucket_waits_for_its_own_gradients_only(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handed over after the backward pass, all-reduces may start within it; nothing is handed over before `launch`."""
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    started: list[tuple[int, int]] = []
    streams = MarkingStreams()
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, **options: Any) -> Any:
        started.append((streams.after, len(tensor)))
        return real(tensor, **options)

    leaves = {name: nn.Parameter(torch.ones(count)) for name, count in (("a", 2), ("b", 3), ("c", 4))}
    reducer = GradientReducer(leaves, group, streams=streams)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with reducer.backward(leaves, 1.0, UpdateGroup()):
        for name in "cba":  # as a backward pass does, one gradient after another
            streams.made += 1
            (leaves[name] * 2).sum().backward()  # type: ignore[no-untyped-call]
    reducer.add({})
    reducer.start(UpdateGroup())
    assert not started
    reducer.launch()
    assert started == [(0, 1), (1, 4 + 1), (2, 3 + 1), (3, 2 + 1)]  # the sum of shares, and each bucket with its flag
    assert all(torch.equal(one, torch.full_like(one, 2.0)) for one in reducer.finish().values())


def test_alone_nothing_is_copied_and_minibatches_count_by_their_share() -> None:
    """Mean over samples: two whole minibatches, and one with a quarter of the samples."""
    reducer = GradientReducer({name: nn.Parameter(torch.zeros(3)) for name in ("a", "unused")}, None)
    given = torch.arange(3.0)
    reducer.add({"a": given})
    reducer.start(UpdateGroup())
    assert reducer.finish()["a"] is given
    assert reducer.finish() == {}
    for factor, share in ((1.0, 1.0), (4.0, 0.25), (2.0, 1.0)):
        reducer.add({"a": torch.arange(3.0) * factor}, share)
    reducer.start(UpdateGroup())
    averaged = reducer.finish()
    assert averaged.keys() == {"a"}
    torch.testing.assert_close(averaged["a"], torch.arange(3.0) * (1 + 4 * 0.25 + 2) / 2.25)


def test_buffers_of_every_type(group: dist.ProcessGroup) -> None:
    buffers = [torch.tensor([1.5]), torch.tensor(3), torch.tensor([True]), torch.tensor([1 + 2j])]
    average_buffers(buffers, group)
    assert [buffer.tolist() for buffer in buffers] == [[1.5], 3, [True], [1 + 2j]]


def test_sparse_gradients_of_replicas_are_refused() -> None:
    weight = nn.Parameter(torch.eye(2))
    GradientReducer({"w": weight}, None).add({"w": weight.detach().to_sparse()})
    replicas: Any = object()
    with pytest.raises(LaunchError, match="the gradient of 'w' is sparse, which a stage with replicas"):
        GradientReducer({"w": weight}, replicas).add({"w": weight.detach().to_sparse()})


def test_tags_of_messages_under_way_differ() -> None:
    """Activations of three tensors forward, gradients of two back."""
    transport = Transport(0, 0, torch.device("cpu"))

    def tags_of(direction: Direction, minibatch: int, count: int) -> list[int]:
        return [tag for _, tag in transport._tagged(direction, minibatch, [torch.zeros(1)] * count)]

    tags = [
        tag
        for direction, count in ((Direction.ACTIVATIONS, 3), (Direction.GRADIENTS, 2))
        for minibatch in range(1000)
        for tag in tags_of(direction, minibatch, count)
    ]
    assert len(set(tags)) == len(tags) == 5000
    assert all(0 <= tag < 2**31 for tag in tags)
    assert all(0 <= tag < 2**31 for tag in tags_of(Direction.GRADIENTS, 2**40, 2))


def test_gradients_travel_by_connections_of_their_own_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process groups are stand-ins: what is tested is which of them carries a message."""
    used: list[tuple[str, object]] = []

    def record(name: str) -> Callable[..., object]:
        return lambda tensor, peer, group, tag: used.append((name, group)) or object()

    monkeypatch.setattr(p2p.dist, "isend", record("send"))
    monkeypatch.setattr(p2p.dist, "irecv", record("receive"))
    for second in ("second", None):
        transport = Transport(0, 0, torch.device("cpu"), gradients=second)  # type: ignore[arg-type]
        for direction in (Direction.ACTIVATIONS, Direction.GRADIENTS):
            transport.post(direction, 0, 1, [MessageTensor((2,), torch.float32)])
            transport.send(direction, 1, 1, [torch.zeros(2)])
        assert used == [("receive", None), ("send", None), ("receive", second), ("send", second)]
        used.clear()


@pytest.mark.parametrize("freeze", [False, True])
def test_a_lost_peer_is_named(tmp_path: Path, freeze: bool) -> None:
    ended = run_toy(tmp_path, Toy(die=(0, 3), freeze=freeze), [1, 1], "--timeout", "2")
    assert ended.statuses[1] == 2
    why = r"[Tt]imed out" if freeze else "[Cc]onnection closed by peer|Connection reset by peer|Broken pipe"
    waited = "waited for the activations of minibatch 3 from rank 0, which did not come"
    undelivered = r"could not deliver the gradients of minibatch \d to rank 0"
    line = rf"^error: stage 1 \(rank 1\) ({waited}|{undelivered}): (.* )?({why})"
    assert re.search(line, ended.err, re.MULTILINE), ended.err
