"""The activity of each worker over time in one form for simulations and for runs, so that the two can be compared.

A run records its activity (`pipeplan.measured`); a simulation plays actions with the times of the plan. In a simulation
the optimiser's step, which the plan charges to each backward pass, is the end of that pass; the exposed part of an
all-reduce is a wait; and a worker waits whenever it plays no action.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pipeplan.errors import InputError
from pipeplan.measured.run import ALL_REDUCE, BACKWARD, FORWARD, UPDATE, WAIT, Interval, Run
from pipeplan.simulation.engine import Pass, Replayed
from pipeplan.simulation.scenario import Scenario
from pipeplan_launch.schedule import Action, Kind, group_count

BRIEF_S = 2e-5
"""Shorter waits are left out, in runs and in simulations."""
_ACTIONS = {FORWARD: Kind.FORWARD, BACKWARD: Kind.BACKWARD, UPDATE: Kind.UPDATE, ALL_REDUCE: Kind.REDUCE}


class Bar(NamedTuple):
    """A period in which a worker was busy, or waited."""

    kind: str
    """One of `pipeplan.measured.run.KINDS`."""
    action: Action
    """The action that it performed, or for which it waited."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Lane:
    """The activity of one worker."""

    worker: int
    stage: int
    """Index of its stage, from 0."""
    replica: int
    bars: tuple[Bar, ...]
    """Its bars, in the order of their starts."""


def predicted(scenario: Scenario, replayed: Replayed, minibatches: int) -> list[Lane]:
    """The lanes of a simulation of `minibatches` minibatches, in the order of the workers' numbers."""
    played: dict[tuple[int, int], list[Pass]] = {}
    for done in replayed.actions:
        played.setdefault((done.stage, done.replica), []).append(done)
    lanes = []
    for stage, load in enumerate(scenario.stages):
        for replica, worker in enumerate(load.workers):
            passes = played.get((stage, replica), [])
            bars = _played(scenario, stage, replica, passes, minibatches)
            lanes.append(Lane(worker, stage, replica, tuple(sorted(bars, key=lambda bar: bar.start_s))))
    return sorted(lanes, key=lambda lane: lane.worker)


def _played(scenario: Scenario, stage: int, replica: int, passes: Sequence[Pass], minibatches: int) -> Iterator[Bar]:
    """The bars of one worker, from its simulated passes."""
    load, shape = scenario.stages[stage], scenario.shapes[stage]
    size = scenario.schedule.group_size(shape)
    now, queue = 0.0, iter(passes)
    begun: dict[int, float] = {}
    updated: set[int] = set()
    for action in scenario.schedule.stream(scenario.shapes, stage, replica, minibatches):
        if action.kind is Kind.REDUCE:
            begun[action.index] = now
            continue
        done = next(queue)
        if action.kind is Kind.UPDATE:
            if done.end_s - now >= BRIEF_S:
                yield Bar(WAIT, action, now, done.end_s)
            if load.replicas > 1:
                yield Bar(ALL_REDUCE, Action(Kind.REDUCE, action.index), begun.pop(action.index), done.end_s)
            if action.index not in updated:
                yield Bar(UPDATE, action, done.end_s, done.end_s)
        else:
            if done.start_s - now >= BRIEF_S:
                yield Bar(WAIT, action, now, done.start_s)
            if action.kind is Kind.FORWARD:
                yield Bar(FORWARD, action, done.start_s, done.end_s)
            else:
                step_s = done.end_s - (done.end_s - done.start_s) * load.update_share
                yield Bar(BACKWARD, action, done.start_s, step_s)
                if load.update_share:
                    updated.add(action.index // size)
                    yield Bar(UPDATE, Action(Kind.UPDATE, action.index // size), step_s, done.end_s)
        now = done.end_s


def measured(scenario: Scenario, run: Run) -> list[Lane]:
    """The lanes of a run of the plan. Raises an `InputError` where it recorded no timelines, or is of another plan."""
    if not run.recorded:
        raise InputError(f"{run.folder} has no timelines: it is of an older executor, so run the plan again")
    places = {
        worker: (stage, replica)
        for stage, load in enumerate(scenario.stages)
        for replica, worker in enumerate(load.workers)
    }
    lanes = []
    for rank, timeline in run.recorded.items():
        if places.get(rank) != (timeline.stage, timeline.replica):
            raise InputError(f"{run.folder} is of another plan: its worker {rank} has another stage")
        lanes.append(Lane(rank, timeline.stage, timeline.replica, tuple(_recorded(timeline.intervals))))
    return lanes


def _recorded(intervals: Sequence[Interval]) -> Iterator[Bar]:
    """The bars of one worker, from its recorded intervals. A wait is for the action that follows it."""
    awaited: dict[int, Action] = {}
    others = [(index, interval) for index, interval in enumerate(intervals) if interval.kind != ALL_REDUCE]
    for (index, wait), (_, after) in pairwise(others):
        if wait.kind == WAIT and after.kind != WAIT:
            awaited[index] = Action(_ACTIONS[after.kind], after.number)
    for index, interval in enumerate(intervals):
        waits = interval.kind == WAIT
        action = awaited.get(index) if waits else Action(_ACTIONS[interval.kind], interval.number)
        if action is not None:
            yield Bar(interval.kind, action, interval.start_s, interval.end_s)


def shifted(lanes: Sequence[Lane], scenario: Scenario, first: int) -> list[Lane]:
    """The lanes with minibatches counted from `first`, as a run that resumes in the middle of an epoch counts them."""
    if not first:
        return list(lanes)
    moved = []
    for lane in lanes:
        groups = group_count(scenario.schedule.group_size(scenario.shapes[lane.stage]), first)
        bars = tuple(bar._replace(action=_later(bar.action, first, groups)) for bar in lane.bars)
        moved.append(Lane(lane.worker, lane.stage, lane.replica, bars))
    return moved


def _later(action: Action, minibatches: int, groups: int) -> Action:
    offset = groups if counts_groups(action) else minibatches
    return Action(action.kind, action.index + offset)


def counts_groups(action: Action) -> bool:
    """Whether an action's index is that of a group of minibatches."""
    return action.kind in (Kind.REDUCE, Kind.UPDATE)


def within(lanes: Sequence[Lane], scenario: Scenario, minibatches: int) -> list[Lane]:
    """The lanes cut to the first `minibatches` minibatches, and to the groups that begin among them."""
    kept = []
    for lane in lanes:
        size = scenario.schedule.group_size(scenario.shapes[lane.stage])
        groups = group_count(size, minibatches)
        bars = tuple(
            bar for bar in lane.bars if bar.action.index < (groups if counts_groups(bar.action) else minibatches)
        )
        kept.append(Lane(lane.worker, lane.stage, lane.replica, bars))
    return kept
