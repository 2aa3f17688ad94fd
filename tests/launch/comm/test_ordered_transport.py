"""What the ordered transport hands to torch.distributed, recorded: without NCCL, a GPU, or another process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from extents import first_few
from order_rules import stuck_devices
from recorded_transport import Device, Hazard, plan_of, record
from schedule_rules import NAMES, pipelines, shapes

from pipeplan_launch.comm.ordered_transport import OrderedTransport
from pipeplan_launch.comm.p2p import MessageTensor
from pipeplan_launch.plan.communication_order import Direction
from pipeplan_launch.plan.launch_plan import Prediction
from pipeplan_launch.plan.run_options import memory_beyond_plan, memory_note
from pipeplan_launch.plan.schedule import SCHEDULES, Schedule, StageShape

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


def test_slots_are_used_again_and_never_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, _ = record(monkeypatch, STASHING, shapes((1, 1, 1)), [30, 7])
    received = {begin for device in devices for begin, _, _ in device.readers}
    # Two tensors of a message, and slots of the rings: depths 3, 2, 1 and one more, and two for gradients.
    assert len(received) <= 2 * (3 + 2) + (2 + 2) + 2


class NeverMarks(OrderedTransport):
    """Forgets to wait for the last reader of a slot."""

    def release(self, direction: Direction, minibatch: int) -> None:
        super().release(direction, minibatch)
        for ring in self._rings.values():
            for slot in ring._slots.values():
                slot.free = []


class ReleasesEarly(OrderedTransport):
    """Takes a slot for free as soon as its message is handed out."""

    def take(self, direction: Direction, minibatch: int) -> Any:
        tensors = super().take(direction, minibatch)
        self.release(direction, minibatch)
        return tensors


class TakesUnwaited(OrderedTransport):
    """Hands out messages that may not have come."""

    def take(self, direction: Direction, minibatch: int) -> Any:
        received = self._receiving.pop((direction, minibatch))
        return [tensor.data for tensor in received.slot.tensors(received.layout)]


class ForgetsSent(OrderedTransport):
    """Keeps no tensor that is on its way."""

    def start_send(self, direction: Direction, minibatch: int, destination: int) -> None:
        super().start_send(direction, minibatch, destination)
        self._sent[direction, destination][-1].tensors = ()


class OneSlot(OrderedTransport):
    """Has one slot in place of a ring."""

    def start_receive(
        self,
        direction: Direction,
        minibatch: int,
        source: int,
        layout: Sequence[MessageTensor],
        position: int,
        slots: int,
    ) -> None:
        super().start_receive(direction, minibatch, source, layout, 0, 1)


class SendsOnCarelessly(OrderedTransport):
    """Writes over what is being sent on."""

    def _settle_passed_on(self, slot: object) -> None:
        pass


def test_a_slot_is_not_written_while_it_is_sent_on(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SCHEDULES["forward-only"]
    record(monkeypatch, forward, shapes((1, 1, 1)), [30])
    with pytest.raises(Hazard, match="is being sent on"):
        record(monkeypatch, forward, shapes((1, 1, 1)), [30], kind=SendsOnCarelessly)


@pytest.mark.parametrize("wrong", [NeverMarks, ReleasesEarly, TakesUnwaited, ForgetsSent, OneSlot])
def test_a_transport_that_corrupts_data_is_caught(
    monkeypatch: pytest.MonkeyPatch, wrong: type[OrderedTransport]
) -> None:
    with pytest.raises((Hazard, AssertionError)):
        record(monkeypatch, STASHING, shapes((2, 2, 1)), [30], kind=wrong)


def test_rings_have_the_slots_that_the_plan_and_the_note_account_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot more than minibatches in flight for activations, and two for gradients, however long a segment is."""
    transports: list[OrderedTransport] = []

    class Kept(OrderedTransport):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            transports.append(self)

    record(monkeypatch, STASHING, [StageShape(2, 3), StageShape(1, 4), StageShape(1, 1)], [40, 7], kind=Kept)
    slots = [tuple(len(one._rings[way]._slots) for way in Direction) for one in transports]
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
