"""Finds the states of a steady-state search on equal servers with compiled loops.

The array code of `uniform_search` spreads the states of a cut to all cuts in front of it, many at a time. The loops
collect the states of a cut from all cuts behind it, one at a time, and compare each with those found so far before they
go into what it takes. Both come to the same states.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from pipeplan.solvers.dp.compiled import front_loops
from pipeplan.solvers.dp.compiled.cut_loops import ROOM, Places, Scratch
from pipeplan.solvers.dp.compiled.front_loops import Front
from pipeplan.solvers.dp.compiled.loop_inputs import Search, arrays_of, bounds_of, numbers_of
from pipeplan.solvers.dp.compiled.search_loops import (
    CUT,
    DONE,
    FRONT,
    FULL,
    FULL_FRONT,
    UNBOUNDED,
    Kept,
    search_cuts,
)
from pipeplan.solvers.dp.search_states import SearchStates

_FIRST_ROOM, _FRONT_ROOM = 4096, 256
"""Rows of the tables and of the front at first."""

Table = TypeVar("Table", Kept, Places, Front)


def kept_states(search: Search) -> dict[int, SearchStates]:
    """The undominated states of all cuts that have any. Raises `OutOfTime`."""
    cuts, levels = search.last + 1, search.layout.top + 1
    given, arrays, bounds = numbers_of(search), arrays_of(search), bounds_of(search)
    begins, ends, last = np.zeros((3, cuts), dtype=np.intp)
    places = Places(begins, ends, last, _numbers(_FIRST_ROOM, ROOM + levels), np.zeros(_FIRST_ROOM))
    begins, ends = np.zeros((2, cuts), dtype=np.intp)
    kept = Kept(begins, ends, _numbers(_FIRST_ROOM, front_loops.ORDER), np.zeros(_FIRST_ROOM))
    front = Front(_numbers(_FRONT_ROOM, front_loops.ORDER + 1), np.zeros(_FRONT_ROOM))
    fewest = np.zeros((2, 0 if search.counts_depths else cuts, levels))
    scratch = Scratch(np.zeros((levels, 2, 4)), np.zeros(len(bounds.table)), fewest)
    progress = np.array([search.last, 0, 0, -1], dtype=np.intp)
    reason = FULL
    while reason != DONE:
        search.limits.step()
        reason = search_cuts(given, arrays, bounds, places, kept, front, scratch, search.counts_depths, progress)
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
            found[cut] = SearchStates(columns[:, rows], kept.demand[rows])
    return found


def _numbers(rows: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    return np.zeros((rows, columns), dtype=np.intp)


def _grown(table: Table) -> Table:
    """Copy a table into one that has room for twice as many rows."""
    numbers, demand = table.numbers, table.demand
    more, demands = np.zeros_like(numbers), np.zeros_like(demand)
    return table._replace(numbers=np.concatenate([numbers, more]), demand=np.concatenate([demand, demands]))
