"""The activity of each worker over time, in one form for simulations and runs.

A run records its activity (`pipeplan.run_data`). A simulation runs actions with the times of the plan. There the
optimiser's step is at the end of a backward pass, or, under schedules that accumulate, at the end of U. The exposed
part of an all-reduce counts as a wait, and so does any time without an action.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from pipeplan.errors import InputError
from pipeplan.run_data.run_folder import (
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
    UPDATE,
    WAIT,
    WEIGHTS,
    MeasuredRun,
    TimelineInterval,
)
from pipeplan.simulation.events import Pass, SimulatedEvents
from pipeplan.simulation.scenario import Scenario
from pipeplan_launch.plan.schedule import Action, ActionKind, group_count

BRIEF_S = 2e-5
"""Length in seconds below which waits are left out, in runs and in simulations."""
_ACTIONS = {
    FORWARD: ActionKind.FORWARD,
    BACKWARD: ActionKind.BACKWARD,
    WEIGHTS: ActionKind.WEIGHTS,
    UPDATE: ActionKind.UPDATE,
    ALL_REDUCE: ActionKind.REDUCE,
}


class Bar(NamedTuple):
    """A period in which a worker was busy, or waited."""

    kind: str
    """Kind of activity, one of `pipeplan_launch.telemetry.run_folder.KINDS`."""
    action: Action
    """The action that the worker ran or waited for."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Lane:
    """The activity of one worker."""

    worker: int
    stage: int
    """Index of the worker's stage, from 0."""
    replica: int
    bars: tuple[Bar, ...]
    """The worker's bars, in the order of their starts."""


def predicted_lanes(scenario: Scenario, replayed: SimulatedEvents, minibatches: int) -> list[Lane]:
    """The lanes of a simulation of `minibatches` minibatches, in the order of the workers' indices."""
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
        if action.kind is ActionKind.REDUCE:
            begun[action.index] = now
            continue
        done = next(queue)
        if action.kind is ActionKind.UPDATE:
            averaged_s = done.end_s - load.step_s
            if averaged_s - now >= BRIEF_S:
                yield Bar(WAIT, action, now, averaged_s)
            if load.replicas > 1:
                yield Bar(ALL_REDUCE, Action(ActionKind.REDUCE, action.index), begun.pop(action.index), averaged_s)
            if action.index not in updated:
                yield Bar(UPDATE, action, averaged_s, done.end_s)
        else:
            if done.start_s - now >= BRIEF_S:
                yield Bar(WAIT, action, now, done.start_s)
            if action.kind is ActionKind.FORWARD:
                yield Bar(FORWARD, action, done.start_s, done.end_s)
            elif action.kind is ActionKind.WEIGHTS:
                if done.end_s > done.start_s:
                    yield Bar(WEIGHTS, action, done.start_s, done.end_s)
            else:
                share = load.update_share and load.update_share * load.backward_s / (load.backward_s - load.weights_s)
                step_s = done.end_s - (done.end_s - done.start_s) * share
                yield Bar(BACKWARD, action, done.start_s, step_s)
                if load.update_share:
                    updated.add(action.index // size)
                    yield Bar(UPDATE, Action(ActionKind.UPDATE, action.index // size), step_s, done.end_s)
        now = done.end_s


def measured_lanes(scenario: Scenario, run: MeasuredRun) -> list[Lane]:
    """The lanes of a run of the plan.

    Raises an `InputError` if the run recorded no timelines, or is a run of another plan.
    """
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


def _recorded(intervals: Sequence[TimelineInterval]) -> Iterator[Bar]:
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


def cut_lanes(lanes: Sequence[Lane], scenario: Scenario, minibatches: int, first: int = 0) -> list[Lane]:
    """The lanes with only the first `minibatches` minibatches, and the groups that begin among them.

    The result counts minibatches from `first`, as in a run that resumes in the middle of an epoch.
    """
    kept = []
    for lane in lanes:
        size = scenario.schedule.group_size(scenario.shapes[lane.stage])
        groups, first_group = group_count(size, minibatches), group_count(size, first)
        bars = []
        for bar in lane.bars:
            kind, index = bar.action.kind, bar.action.index
            end, begin = (groups, first_group) if counts_groups(bar.action) else (minibatches, first)
            if index < end:
                bars.append(bar._replace(action=Action(kind, index + begin)))
        kept.append(replace(lane, bars=tuple(bars)))
    return kept


def counts_groups(action: Action) -> bool:
    """Whether an action's index counts groups of minibatches, and not minibatches."""
    return action.kind in (ActionKind.REDUCE, ActionKind.UPDATE)
