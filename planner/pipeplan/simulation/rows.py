"""Draws timelines of simulations and runs as rows of characters, one row for each worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from pipeplan.measured.run import BACKWARD, FORWARD, UPDATE, WAIT
from pipeplan.simulation.engine import Pass
from pipeplan.simulation.lanes import Lane
from pipeplan_launch.schedule import Action, Kind

MOST_ROWS = 32
"""Largest number of workers that are drawn."""
_STYLES = {Kind.FORWARD: "cyan", Kind.BACKWARD: "magenta", Kind.UPDATE: "yellow"}
# The number of a pass is followed by dashes for forward and double dashes for backward, to be read without colours.
_FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.UPDATE: "~"}


class Mark(NamedTuple):
    """An action to draw. An update stands for the time that the worker waits for its all-reduce."""

    action: Action
    start_s: float
    end_s: float


def played(passes: Sequence[Pass]) -> list[Mark]:
    """The marks of one worker's simulated passes."""
    return [Mark(done.action, done.start_s, done.end_s) for done in passes]


def recorded(lane: Lane) -> list[Mark]:
    """The marks of one worker of a run. As in a simulation, the optimiser's step is the end of a backward pass."""
    marks: list[Mark] = []
    for bar in lane.bars:
        held_up = bar.kind == WAIT and bar.action.kind is Kind.UPDATE
        if bar.kind in (FORWARD, BACKWARD) or held_up:
            before = marks[-1] if marks else None
            if before is not None and before.action == bar.action:  # another part of the same backward pass
                marks[-1] = before._replace(end_s=bar.end_s)
            else:
                marks.append(Mark(bar.action, bar.start_s, bar.end_s))
        elif bar.kind == UPDATE and marks and marks[-1].action.kind is Kind.BACKWARD:
            marks[-1] = marks[-1]._replace(end_s=bar.end_s)
    return marks


def rows(workers: Sequence[tuple[str, Sequence[Mark]]], span_s: float, width: int) -> Iterator[Text]:
    """The rows of the first `span_s` seconds, one of `width` columns for each worker (label, marks)."""
    margin = max((len(label) for label, _ in workers), default=0)
    for label, marks in workers[:MOST_ROWS]:
        yield Text().append(label.ljust(margin), "dim").append_text(_row(marks, span_s, cells_of(width, margin)))
    if len(workers) > MOST_ROWS:
        yield Text(f"… {len(workers)} workers in all", "dim")


def cells_of(width: int, margin: int) -> int:
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
