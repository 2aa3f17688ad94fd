"""Timelines as rows of characters, a row a worker: of a replay, and of a run laid beneath it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from pipeplan.measured.run import BACKWARD, FORWARD, UPDATE, WAIT
from pipeplan.simulation.engine import Pass
from pipeplan.simulation.lanes import Lane
from pipeplan_launch.schedule import Action, Kind

MOST_ROWS = 32
_STYLES = {Kind.FORWARD: "cyan", Kind.BACKWARD: "magenta", Kind.UPDATE: "yellow"}
# Past its number a forward pass goes on as dashes, a backward pass as double ones: that can be told without colours.
_FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.UPDATE: "~"}


class Mark(NamedTuple):
    """What is drawn of an action: an update is the time that its all-reduce holds the worker up."""

    action: Action
    start_s: float
    end_s: float


def played(passes: Sequence[Pass]) -> list[Mark]:
    """The marks of one worker's passes."""
    return [Mark(done.action, done.start_s, done.end_s) for done in passes]


def recorded(lane: Lane) -> list[Mark]:
    """The marks of what a run recorded: as in a replay, the optimiser's step is the end of a backward pass."""
    marks: list[Mark] = []
    for bar in lane.bars:
        held_up = bar.kind == WAIT and bar.action.kind is Kind.UPDATE
        if bar.kind in (FORWARD, BACKWARD) or held_up:
            before = marks[-1] if marks else None
            if before is not None and before.action == bar.action:  # the parts of a backward pass
                marks[-1] = before._replace(end_s=bar.end_s)
            else:
                marks.append(Mark(bar.action, bar.start_s, bar.end_s))
        elif bar.kind == UPDATE and marks and marks[-1].action.kind is Kind.BACKWARD:
            marks[-1] = marks[-1]._replace(end_s=bar.end_s)
    return marks


def rows(workers: Sequence[tuple[str, Sequence[Mark]]], span_s: float, width: int) -> Iterator[Text]:
    """A row for each worker (label, marks) of the first `span_s` seconds, each of `width` columns."""
    margin = max((len(label) for label, _ in workers), default=0)
    for label, marks in workers[:MOST_ROWS]:
        yield Text().append(label.ljust(margin), "dim").append_text(_row(marks, span_s, cells_of(width, margin)))
    if len(workers) > MOST_ROWS:
        yield Text(f"… {len(workers)} workers in all", "dim")


def cells_of(width: int, margin: int) -> int:
    """The columns that are left for the time."""
    return max(width - margin, 10)


def _row(marks: Sequence[Mark], span: float, cells: int) -> Text:
    """One worker's, from left to right, idle time as dots."""
    row, drawn = Text(), 0
    for action, start, end in marks:
        if start >= span:
            break
        # At least one cell, unless another short pass has it already.
        first = max(drawn, _cell(start, span, cells))
        last = min(cells, max(_cell(start, span, cells) + 1, _cell(end, span, cells)))
        if last <= first:
            continue
        row.append("." * (first - drawn), "dim")
        label = str(action)
        # A number that is cut off would be another number.
        shown = label if len(label) <= last - first else action.kind.value
        row.append(shown.ljust(last - first, _FILL[action.kind]), _STYLES[action.kind])
        drawn = last
    return row.append("." * (cells - drawn), "dim")


def _cell(time_s: float, span: float, cells: int) -> int:
    return min(cells, round(time_s / span * cells)) if span > 0 else 0
