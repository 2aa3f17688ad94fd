"""The activity of each worker over time, in one form for simulations and runs, and its drawing as rows of characters.

A run records its activity (`pipeplan.run_data`); a simulation plays actions with the times of the plan. In a simulation
the optimiser's step is the end of a backward pass, or under schedules that accumulate that of U; the exposed part of an
all-reduce is a wait; and a worker waits whenever it plays no action.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from rich.text import Text

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
"""Shorter waits are left out, in runs and in simulations."""
_ACTIONS = {
    FORWARD: ActionKind.FORWARD,
    BACKWARD: ActionKind.BACKWARD,
    WEIGHTS: ActionKind.WEIGHTS,
    UPDATE: ActionKind.UPDATE,
    ALL_REDUCE: ActionKind.REDUCE,
}
MOST_ROWS = 32
"""Largest number of workers that are drawn."""
_STYLES = {
    ActionKind.FORWARD: "cyan",
    ActionKind.BACKWARD: "magenta",
    ActionKind.WEIGHTS: "blue",
    ActionKind.UPDATE: "yellow",
}
# The number of a pass is followed by dashes for forward and double dashes for backward, to be read without colours.
_FILL = {ActionKind.FORWARD: "-", ActionKind.BACKWARD: "=", ActionKind.WEIGHTS: "+", ActionKind.UPDATE: "~"}


class Bar(NamedTuple):
    """A period in which a worker was busy, or waited."""

    kind: str
    """One of `pipeplan_launch.telemetry.run_folder.KINDS`."""
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


def predicted_lanes(scenario: Scenario, replayed: SimulatedEvents, minibatches: int) -> list[Lane]:
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
    """The lanes cut to the first `minibatches` minibatches, and to the groups that begin among them.

    Minibatches are then counted from `first`, as a run that resumes in the middle of an epoch counts them.
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
    """Whether an action's index is that of a group of minibatches."""
    return action.kind in (ActionKind.REDUCE, ActionKind.UPDATE)


class Mark(NamedTuple):
    """An action to draw. An update stands for the time that the worker waits for its all-reduce."""

    action: Action
    start_s: float
    end_s: float


def recorded_marks(lane: Lane) -> list[Mark]:
    """The marks of one worker of a run. As in a simulation, the optimiser's step is the end of a backward pass."""
    marks: list[Mark] = []
    for bar in lane.bars:
        held_up = bar.kind == WAIT and bar.action.kind is ActionKind.UPDATE
        if bar.kind in (FORWARD, BACKWARD, WEIGHTS) or held_up:
            before = marks[-1] if marks else None
            if before is not None and before.action == bar.action:  # another part of the same backward pass
                marks[-1] = before._replace(end_s=bar.end_s)
            else:
                marks.append(Mark(bar.action, bar.start_s, bar.end_s))
        elif bar.kind == UPDATE and marks and marks[-1].action.kind is ActionKind.BACKWARD:
            marks[-1] = marks[-1]._replace(end_s=bar.end_s)
    return marks


def draw_rows(workers: Sequence[tuple[str, Sequence[Mark]]], span_s: float, width: int) -> Iterator[Text]:
    """Draw the first `span_s` seconds: one row of `width` columns for each worker, which is given as (label, marks)."""
    margin = max((len(label) for label, _ in workers), default=0)
    for label, marks in workers[:MOST_ROWS]:
        yield Text().append(label.ljust(margin), "dim").append_text(_row(marks, span_s, time_cells(width, margin)))
    if len(workers) > MOST_ROWS:
        yield Text(f"… {len(workers)} workers in all", "dim")


def time_cells(width: int, margin: int) -> int:
    """Number of columns that are left for the time axis."""
    return max(width - margin, 10)


def _row(marks: Sequence[Mark], span: float, cells: int) -> Text:
    """The row of one worker; idle time is drawn as dots."""
    row, drawn = Text(), 0
    for action, start, end in marks:
        if start >= span:
            break
        # Every pass gets at least one cell, unless another short pass has taken it.
        first = max(drawn, _cell(start, span, cells))
        last = min(cells, max(_cell(start, span, cells) + 1, _cell(end, span, cells)))
        if last <= first:
            continue
        row.append("." * (first - drawn), "dim")
        label = str(action)
        # A number that does not fit is left out, because its first digits would be another number.
        shown = label if len(label) <= last - first else action.kind.value
        row.append(shown.ljust(last - first, _FILL[action.kind]), _STYLES[action.kind])
        drawn = last
    return row.append("." * (cells - drawn), "dim")


def _cell(time_s: float, span: float, cells: int) -> int:
    return min(cells, round(time_s / span * cells)) if span > 0 else 0
