"""Looks up the least workers in front of a cut: the scalar form of `worker_bounds`, as far as its table goes."""

from __future__ import annotations

from pipeplan.solvers.dp.compiled.jit import compiled
from pipeplan.solvers.dp.compiled.loop_inputs import Bounds


@compiled
def bounds_row(bounds: Bounds, demand: float) -> int:
    """The row of the table for the demand of the stage behind a cut, or -1 where it is not known."""
    whole = int(min(max(demand, bounds.least), bounds.most))
    return int(bounds.rows[whole]) if whole < len(bounds.rows) else -1


@compiled
def workers_needed(bounds: Bounds, demand: float, cut: int) -> float:
    """The least workers in front of a cut; 0 where it is not known."""
    row = bounds_row(bounds, demand)
    return float(bounds.table[row, cut]) if row >= 0 else 0.0
