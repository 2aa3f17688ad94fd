"""Messages within one worker's view: their tags and connections, and that a lost peer is named."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy_workers import Toy, run_plan, stage_contents, write_plan

from pipeplan_launch.comm import p2p
from pipeplan_launch.comm.p2p import MessageTensor, Transport, _tag
from pipeplan_launch.plan.communication_order import Direction


def test_tags_of_messages_under_way_differ() -> None:
    """Activations of three tensors forward, gradients of two back."""
    tags = [
        _tag(direction, minibatch, index, count)
        for direction, count in ((Direction.ACTIVATIONS, 3), (Direction.GRADIENTS, 2))
        for minibatch, index in itertools.product(range(1000), range(count))
    ]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < 2**31 for tag in tags)
    assert 0 <= _tag(Direction.GRADIENTS, 2**40, 1, 2) < 2**31


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_travel_by_connections_of_their_own_where_there_are_any(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process groups are stand-ins: what is tested is which of them carries a message."""
    used: list[tuple[str, object]] = []

    def record(name: str) -> Callable[..., object]:
        return lambda tensor, peer, group, tag: used.append((name, group)) or object()

    monkeypatch.setattr(p2p.dist, "isend", record("send"))
    monkeypatch.setattr(p2p.dist, "irecv", record("receive"))
    transport = Transport(0, 0, torch.device("cpu"), gradients="second" if apart else None)  # type: ignore[arg-type]
    layout = [MessageTensor((2,), torch.float32)]
    for direction in (Direction.ACTIVATIONS, Direction.GRADIENTS):
        transport.post(direction, 0, 1, layout)
        transport.send(direction, 1, 1, [torch.zeros(2)])
    returning = "second" if apart else None
    assert used == [("receive", None), ("send", None), ("receive", returning), ("send", returning)]


@pytest.mark.parametrize("freeze", [False, True])
def test_a_lost_peer_is_named(tmp_path: Path, freeze: bool) -> None:
    write_plan(tmp_path, stage_contents([1, 1]))
    toy = Toy(die=(0, 3), freeze=freeze)
    ended = run_plan(tmp_path, ["--run-dir", str(tmp_path / "run"), "--timeout", "2"], toy, 2)
    assert ended.statuses[1] == 2
    why = r"[Tt]imed out" if freeze else "[Cc]onnection closed by peer|Connection reset by peer|Broken pipe"
    waited = "waited for the activations of minibatch 3 from rank 0, which did not come"
    undelivered = r"could not deliver the gradients of minibatch \d to rank 0"
    line = rf"^error: stage 1 \(rank 1\) ({waited}|{undelivered}): (.* )?({why})"
    assert re.search(line, ended.err, re.MULTILINE), ended.err
