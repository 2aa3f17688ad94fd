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
from pipeplan_launch.plan.communication_order import Transfer, communication_order
from pipeplan_launch.plan.run_options import MODES
from pipeplan_launch.plan.schedule import SCHEDULES, ActionKind


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
    """A link has one message at a time under way, in the one order."""
    order = defaultdict(list)
    for node in communication_order(played.schedule, played.shapes, count):
        if isinstance(node, Transfer):
            order[node.source[0], node.destination[0]].append(node.minibatch)
    found = defaultdict(list)
    for transfer in sorted(events.transfers, key=lambda one: one.start_s):
        found[stages_of(transfer.row)].append(transfer)
    for link, transfers in found.items():
        assert [one.number for one in transfers] == order[link]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(transfers))


@pytest.mark.parametrize("seeds", first_few(range(1500), 40))
def test_straight_plans_keep_the_order_and_are_never_faster_for_it(seeds: range) -> None:
    slower = 0
    for seed in seeds:
        free, count = drawn(seed)
        ordered = replace(free, transport="nccl")
        events = simulate_schedule(ordered, count)
        check_queues(ordered, events, count)
        end_s = simulate_schedule(free, count).end_s
        assert end_s <= events.end_s + 1e-9, seed
        slower += events.end_s > end_s + 1e-6
    assert slower


@pytest.mark.parametrize("seeds", first_few(range(1500), 40))
def test_plans_with_replicas_come_to_an_end(seeds: range) -> None:
    for seed in seeds:
        free, count = drawn(seed, replicas=3)
        whole = len(simulate_schedule(free, count).actions)
        assert len(simulate_schedule(replace(free, transport="nccl"), count).actions) == whole, seed


def test_a_third_message_under_way_makes_computing_wait() -> None:
    """The first message leaves at 1 + 10 s; two more are made by 3 s, and the fourth pass has to wait."""
    slow = scenario([(1, 4, 1.0, 1.0), (1, 2, 1.0, 1.0)], [(10.0, 0.0)])
    starts = {}
    for transport in ("gloo", "nccl"):
        events = simulate_schedule(replace(slow, transport=transport), 6)
        passes = [one for one in events.passes if one.stage == 0 and one.action.kind is ActionKind.FORWARD]
        starts[transport] = [one.start_s for one in passes][:4]
    assert starts == {"gloo": [0.0, 1.0, 2.0, 3.0], "nccl": [0.0, 1.0, 2.0, 11.0]}


def test_the_names_are_those_of_the_executor() -> None:
    assert TRANSPORTS == MODES
    with pytest.raises(InputError, match=r"there is no transport 'ncl'; did you mean 'nccl'\?"):
        check_transport("ncl")
    with pytest.raises(InputError, match=r"the transport 'host' is called 'gloo' now"):
        check_transport("host")
