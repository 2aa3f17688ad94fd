"""Messages in the one order: what the transport hands to torch.distributed, recorded without NCCL, a GPU, or another
process; and runs over Gloo on the CPU, which train the same as in any other order, bit by bit.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from extents import first_few, slow_but_for
from order_rules import stuck_devices
from recorded_transport import Device, plan_of, record
from saved import latest, model_of
from schedule_rules import NAMES, TRAINING, pipelines, shapes
from toy_training import train
from toy_workers import Toy, run_toy, stage_contents, write_plan

from pipeplan_launch.comm.ordered_transport import OrderedTransport
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.communication_order import Direction
from pipeplan_launch.plan.launch_plan import Prediction
from pipeplan_launch.plan.run_options import (
    Compression,
    GradientAveraging,
    memory_beyond_plan,
    memory_note,
    transport_of,
)
from pipeplan_launch.plan.schedule import SCHEDULES, Schedule, StageShape
from pipeplan_launch.plan.stage_files import load_plan

STASHING = SCHEDULES["1f1b-stashing"]


def drawn(seed: int) -> tuple[Schedule, Sequence[StageShape], int, int | None]:
    """(schedule, pipeline, minibatches, where the segment ends early)."""
    draw = random.Random(seed)
    replicas = [draw.randint(1, 3) for _ in range(draw.randint(2, 4))]
    schedule = SCHEDULES[draw.choice(NAMES)]
    pipeline = draw.choice(list(pipelines(schedule, replicas, [draw.randint(0, 1) for _ in replicas])))
    count = draw.randint(2, 25)
    return schedule, pipeline, count, draw.randint(1, count) if draw.random() < 0.3 else None


def both_ends_agree(devices: Sequence[Device]) -> None:
    """For each edge, what the sender posts is what the receiver posts: group, shapes and types, in order."""
    sent: dict[Any, list[Any]] = {}
    received: dict[Any, list[Any]] = {}
    for device in devices:
        for what, source, destination, *content in device.posted:
            (sent if what == "send" else received).setdefault((source, destination), []).append(content)
    assert sent == received
    assert sent


@pytest.mark.parametrize("seeds", first_few(range(400), 25))
def test_what_is_handed_over_finishes_and_fits(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    """On devices that do one thing at a time, with the engine's own calls, also where the segment ends early."""
    for seed in seeds:
        schedule, pipeline, count, end = drawn(seed)
        devices, made = record(monkeypatch, schedule, pipeline, [count], end=end)
        assert all(groups == made[0] for groups in made)
        assert not stuck_devices({device.rank: device.steps for device in devices}), f"seed {seed}"
        both_ends_agree(devices)
        assert all(len(device.threads) <= 1 for device in devices)


def test_there_is_a_group_for_every_pair_and_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = record(monkeypatch, STASHING, shapes((2, 1)), [4])
    assert made == [[(0, 2), (1, 2), (0, 2), (1, 2)]] * 3  # edges 0→2, 1→2, 2→0, 2→1


def test_rings_have_the_slots_that_the_plan_and_the_note_account_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot more than minibatches in flight for activations, and two for gradients, however long a segment is."""
    transports: list[OrderedTransport] = []

    class Kept(OrderedTransport):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            transports.append(self)

    record(monkeypatch, STASHING, [StageShape(2, 3), StageShape(1, 4), StageShape(1, 1)], [40, 7], kind=Kept)
    slots = [tuple(sum(place[0] is way for place in one._slots) for way in Direction) for one in transports]
    assert slots == [(0, 2), (0, 2), (5, 2), (2, 0)]


def test_the_note_on_memory_counts_a_second_gradient_each_way() -> None:
    plan = plan_of(STASHING, [StageShape(1, 3), StageShape(1, 2), StageShape(1, 1)])
    sizes = ((0, 4 * 2**20), (2**20, 2**20), (2**20, 0))
    predictions = tuple(Prediction(receive_bytes=one, receive_gradient_bytes=other) for one, other in sizes)
    plan = replace(plan, predictions=predictions)
    assert memory_beyond_plan(plan) == [4 * 2**20, 5 * 2**20, 2**20]
    assert memory_note(plan) == (
        "note: messages by --transport nccl take up to 5 MiB on a worker of stage 1 beyond the memory of the plan"
    )
    assert memory_note(replace(plan, predictions=(Prediction(),) * 3)) is None


Trained = tuple[list[Any], dict[str, torch.Tensor]]


def trained(folder: Path, transport: str, replicas: list[int], toy: Toy, arguments: list[str], **plan: Any) -> Trained:
    """(losses of training and evaluation, weights and buffers) of a run."""
    run = train(folder, toy, replicas, "--transport", transport, "--timeout", "20", *arguments, **plan)
    epochs = json.loads((run / "summary.json").read_text())["epochs"]
    return [(one["loss"], one["test_loss"]) for one in epochs], model_of(latest(run))


def check_equal(tmp_path: Path, replicas: list[int], toy: Toy, arguments: list[str], **plan: Any) -> None:
    free = trained(tmp_path / "gloo", "gloo", replicas, toy, arguments, **plan)
    ordered = trained(tmp_path / "nccl", "nccl", replicas, toy, arguments, **plan)
    assert free[0] == ordered[0]
    assert free[1].keys() == ordered[1].keys()
    assert all(torch.equal(free[1][name], ordered[1][name]) for name in free[1])


def test_the_order_does_not_change_what_is_trained(tmp_path: Path) -> None:
    """With a short last minibatch, tensors that skip a stage, whole numbers, dropout, buffers, evaluation, and a stage
    that recomputes."""
    options = ["--epochs", "2", "--checkpoint-minibatches", "8"]
    check_equal(tmp_path, [1, 1, 1], Toy(samples=41), options, recompute=[False, True, False])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [[1, 1], [2, 1], [1, 3]], ids=str)
@pytest.mark.parametrize("recompute", [[False, False], [True, True]], ids=str)
def test_neither_do_replicas_nor_recomputation(tmp_path: Path, replicas: list[int], recompute: list[bool]) -> None:
    check_equal(tmp_path, replicas, Toy(samples=41), ["--epochs", "2"], recompute=recompute)


OTHER_SCHEDULES = [one.name for one in TRAINING if one.name != "1f1b-stashing"]


@pytest.mark.parametrize("name", slow_but_for(["2bw"], OTHER_SCHEDULES))
@pytest.mark.parametrize("replicas", slow_but_for([[1, 2]], [[1, 2], [2, 1]]), ids=str)
def test_every_schedule_runs_in_the_order(tmp_path: Path, name: str, replicas: list[int]) -> None:
    accumulate = 6 if name in ("2bw", "gpipe", "1f1b-flush", "zb-h1") else None
    plan: dict[str, Any] = {"schedule": name, "accumulate": accumulate}
    check_equal(tmp_path, replicas, Toy(samples=41), ["--epochs", "2"], **plan)


def test_a_lost_peer_is_named(tmp_path: Path) -> None:
    ended = run_toy(tmp_path, Toy(die=(0, 3)), [1, 1], "--timeout", "5", "--transport", "nccl")
    assert ended.statuses[1] == 2
    waited = r"waited for the activations of minibatch \d from rank 0, which did not come"
    undelivered = r"could not deliver the gradients of minibatch \d to rank 0"
    assert re.search(rf"^error: stage 1 \(rank 1\) ({waited}|{undelivered}): ", ended.err, re.MULTILINE), ended.err


def test_what_has_no_place_in_the_order_is_refused(tmp_path: Path) -> None:
    plan = load_plan(write_plan(tmp_path, stage_contents([2, 1])))
    for averaging in (GradientAveraging(Compression("bf16")), GradientAveraging(significance=0.1)):
        with pytest.raises(LaunchError, match="--transport nccl starts everything from one thread"):
            transport_of("nccl", plan, averaging)
