"""Finds the states of a search on equal servers with compiled loops.

The array code of `uniform_search` spreads the states of a cut to all cuts in front of it, many at a time. The loops
collect the states of a cut from all cuts behind it, one at a time, and compare each with those found so far before they
go into what it takes. Both come to the same states.
"""

from __future__ import annotations

from typing import TypeVar, cast

import numpy as np

from pipeplan.problem.cuts import Floats
from pipeplan.solvers.dp.compiled import front_loops
from pipeplan.solvers.dp.compiled.batch_inputs import BatchSearch, batches_of
from pipeplan.solvers.dp.compiled.cut_loops import ROOM, Places, Scratch
from pipeplan.solvers.dp.compiled.front_loops import Front, Kept
from pipeplan.solvers.dp.compiled.loop_inputs import Search, arrays_of, bounds_of, numbers_of
from pipeplan.solvers.dp.compiled.search_loops import (
    CUT,
    DONE,
    FRONT,
    FULL,
    FULL_FRONT,
    UNBOUNDED,
    search_batches,
    search_cuts,
)
from pipeplan.solvers.dp.states.search_states import SearchStates

_FIRST_ROOM, _FRONT_ROOM = 4096, 256
"""Rows of the tables and of the front at first."""

Table = TypeVar("Table", Kept, Places, Front)


def kept_states(search: Search) -> dict[int, SearchStates]:
    """The undominated states of all cuts that have any. Raises `OutOfTime`."""
    cuts, levels = search.last + 1, search.layout.top + 1
    given, arrays, bounds = numbers_of(search), arrays_of(search), bounds_of(search)
    batches = None if search.batch is None else batches_of(cast(BatchSearch, search))
    width = 0 if search.batch is None else search.batch.width
    begins, ends, last = np.zeros((3, cuts), dtype=np.intp)
    places = Places(begins, ends, last, _numbers(_FIRST_ROOM, ROOM + levels), np.zeros(_FIRST_ROOM))
    begins, ends = np.zeros((2, cuts), dtype=np.intp)
    kept = Kept(begins, ends, _numbers(_FIRST_ROOM, front_loops.ORDER), *_reals(_FIRST_ROOM, width))
    front = Front(_numbers(_FRONT_ROOM, front_loops.ORDER + 1), *_reals(_FRONT_ROOM, width))
    fewest = np.zeros((2, 0 if search.counts_depths or batches is not None else cuts, levels))
    scratch = Scratch(np.zeros((levels, 2, 4)), np.zeros(len(bounds.table)), fewest)
    progress = np.array([search.last, 0, 0, -1], dtype=np.intp)
    reason = FULL
    while reason != DONE:
        search.limits.step()
        inputs = given, arrays, bounds, places, kept, front, scratch
        if batches is None:
            reason = search_cuts(*inputs, search.counts_depths, progress)
        else:
            reason = search_batches(*inputs, batches, progress)
        if reason == FULL_FRONT:
            front = _grown(front)
        elif reason == FULL:
            kept, places = _grown(kept), _grown(places)
        elif reason == UNBOUNDED and search.bounds is not None:
            search.bounds.rows_of(front.demand[: progress[FRONT]])
            bounds = bounds_of(search)
            scratch = scratch._replace(memory_need=np.zeros(len(bounds.table)))
    return _by_cut(kept, int(progress[CUT]) + 1)


def _by_cut(kept: Kept, first: int) -> dict[int, SearchStates]:
    columns = np.ascontiguousarray(np.vstack([kept.numbers.T, np.zeros((1, len(kept.demand)), dtype=np.intp)]))
    found = {}
    for cut in range(len(kept.begins) - 1, first - 1, -1):
        rows = slice(int(kept.begins[cut]), int(kept.ends[cut]))
        if rows.start < rows.stop:
            times = kept.times[rows] if kept.times.shape[1] else None
            found[cut] = SearchStates(columns[:, rows], kept.demand[rows], times)
    return found


def _numbers(rows: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    return np.zeros((rows, columns), dtype=np.intp)


def _reals(rows: int, width: int) -> tuple[Floats, Floats]:
    """Room for demands and times."""
    return np.zeros(rows), np.zeros((rows, width))


def _grown(table: Table) -> Table:
    """Copy a table into one that has room for twice as many rows."""
    columns = {name: getattr(table, name) for name in ("numbers", "demand", "times") if hasattr(table, name)}
    return table._replace(**{name: np.concatenate([one, np.zeros_like(one)]) for name, one in columns.items()})
