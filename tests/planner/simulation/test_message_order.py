"""Simulations whose messages keep one order: its rules hold, and on straight plans it never saves time."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from extents import first_few

from pipeplan.errors import InputError
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.events import SimulatedEvents
from pipeplan.simulation.message_order import TRANSPORTS, check_transport
from pipeplan.simulation.scenario import Scenario, StageBoundary, StageLoad
from pipeplan_launch.plan.one_order import Transfer, one_order
from pipeplan_launch.plan.schedule import SCHEDULES, ActionKind
from pipeplan_launch.plan.transport_modes import MODES


def scenario(
    passes: list[tuple[int, int, float, float]],
    hops: list[tuple[float, float]],
    name: str = "1f1b-stashing",
    accumulate: int | None = None,
) -> Scenario:
    """Stages as (replicas, depth, forward_s, backward_s), and between them (seconds of a message, its latency)."""
    loads, worker = [], 0
    for replicas, depth, forward, backward in passes:
        loads.append(StageLoad(tuple(range(worker, worker + replicas)), depth, forward, backward, 0.0))
        worker += replicas
    boundaries = tuple((StageBoundary(sent, latency),) for sent, latency in hops)
    return Scenario("", tuple(loads), boundaries, SCHEDULES[name], 1.0, 1.0, accumulate=accumulate)


def drawn(seed: int, replicas: int = 1) -> tuple[Scenario, int]:
    draw = random.Random(seed)
    stages = draw.randint(2, 5)
    counts = [draw.randint(1, replicas) for _ in range(stages)]
    name, accumulate = draw.choice([("1f1b-stashing", None), ("1f1b-flush", 8), ("gpipe", 6), ("forward-only", None)])
    # As deep as a stage may be: with every minibatch of a whole update where the schedule drains.
    depths = [-(-(accumulate or stages - stage + 1) // count) for stage, count in enumerate(counts)]
    passes = [(c, d, draw.random(), 2 * draw.random()) for c, d in zip(counts, depths, strict=True)]
    hops = [(draw.choice((0.0, 0.3, 2.0)) * draw.random(), 0.2 * draw.random()) for _ in range(stages - 1)]
    return scenario(passes, hops, name, accumulate), draw.randint(3, 24)


def stages_of(row: str) -> tuple[int, int]:
    """(sender, receiver) of a link `stage 1 → 2`, from 0."""
    sender, receiver = row.removeprefix("stage ").split(" → ")
    return int(sender) - 1, int(receiver) - 1


def check_queues(played: Scenario, events: SimulatedEvents, count: int) -> None:
    """A worker has one message at a time under way, in the one order."""
    orders = defaultdict(list)
    for node in one_order(played.schedule, played.shapes, count):
        if isinstance(node, Transfer):
            for place in (node.source, node.destination):
                orders[place[0]].append((node.source[0], node.destination[0], node.minibatch))
    found = defaultdict(list)
    for transfer in sorted(events.transfers, key=lambda one: one.start_s):
        for stage in stages_of(transfer.row):
            found[stage].append(transfer)
    for stage, transfers in found.items():
        timed = {stages_of(one.row) for one in transfers}  # messages that take no time are not listed
        assert [(*stages_of(one.row), one.number) for one in transfers] == [
            one for one in orders[stage] if one[:2] in timed
        ]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(transfers))


@pytest.mark.parametrize("seeds", first_few(range(1500), 40))
def test_straight_plans_keep_the_order_and_are_never_faster_for_it(seeds: range) -> None:
    slower = 0
    for seed in seeds:
        free, count = drawn(seed)
        ends = {}
        for transport in TRANSPORTS:
            played = replace(free, transport=transport)
            events = simulate_schedule(played, count)
            ends[transport] = events.end_s
            if transport == "batched":
                check_queues(played, events, count)
        assert ends["host"] <= ends["nccl"] + 1e-9, seed
        assert ends["nccl"] <= ends["batched"] + 1e-9, seed
        slower += ends["batched"] > ends["host"] * 1.01
    assert slower > len(seeds) / 10


@pytest.mark.parametrize("seeds", first_few(range(1500), 40))
def test_plans_with_replicas_come_to_an_end(seeds: range) -> None:
    for seed in seeds:
        free, count = drawn(seed, replicas=3)
        whole = len(simulate_schedule(free, count).actions)
        for transport in ("nccl", "batched"):
            assert len(simulate_schedule(replace(free, transport=transport), count).actions) == whole, seed


def test_a_third_message_under_way_makes_computing_wait() -> None:
    """The first message leaves at 1 + 10 s; two more are made by 3 s, and the fourth pass has to wait."""
    slow = scenario([(1, 4, 1.0, 1.0), (1, 2, 1.0, 1.0)], [(10.0, 0.0)])
    starts = {}
    for transport in ("host", "nccl"):
        events = simulate_schedule(replace(slow, transport=transport), 6)
        passes = [one for one in events.passes if one.stage == 0 and one.action.kind is ActionKind.FORWARD]
        starts[transport] = [one.start_s for one in passes][:4]
    assert starts == {"host": [0.0, 1.0, 2.0, 3.0], "nccl": [0.0, 1.0, 2.0, 11.0]}


def test_both_directions_share_the_queue_of_a_worker() -> None:
    """Messages of 1 s each way between passes of 1 s: with one queue a worker cannot send and receive at once."""
    even = scenario([(1, 4, 0.5, 0.5), (1, 1, 0.5, 0.5)], [(1.0, 0.0)])
    paces = {}
    for transport in TRANSPORTS:
        events = simulate_schedule(replace(even, transport=transport), 60)
        done = events.finished(0, ActionKind.BACKWARD)
        paces[transport] = (done[50] - done[20]) / 30
    assert paces == {"host": pytest.approx(1.0), "nccl": pytest.approx(1.0), "batched": pytest.approx(2.0)}


def test_the_names_are_those_of_the_executor() -> None:
    assert TRANSPORTS == MODES
    with pytest.raises(InputError, match=r"there is no transport 'ncl'; did you mean 'nccl'\?"):
        check_transport("ncl")
