"""The states of the search over cuts, the dominance relation between them, and the pool where they wait for their cut.

A state at a cut J says that the layers behind J can run on workers p … D-1 within the threshold. It has these columns:

    first    p, the first worker of its first stage
    level    λ, the level of the smallest component that contains all workers of that stage
    demand   minibatches in flight that the stage before it must cover (`formulas.in_flight_behind`)
    stages   the number of stages behind J
    workers  the number of busy workers behind J

Let m = max(λ, level(p-1, p)), the lowest level that can join a stage in front with (p, λ). A state (p', λ') with no
larger demand dominates the state (p, λ) at the same cut under three conditions. First, λ' ≤ m. Second, p' has at least
as much room in its component of level m as p has in its own component: p' mod span ≥ p mod span. Third, from level m
upwards, the component of p' has at least the same index inside the next larger component as the component of p.
Every stage in front of (p, λ) then has a counterpart in front of (p', λ'), which is no slower and needs no more workers
or memory. A stage inside p's component moves into the component of p', at the same distance. Any other stage stays in
its place: in both cases, a component of a level above m joins it with the next stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import StateCounts
from pipeplan.solvers.dp.search.topology import ComponentLayout

_COLUMNS = ("first", "level", "stages", "workers", "replicas", "depth", "recompute", "end", "source", "ways")
# Rows are compared in chunks of growing size, and with the kept rows in pieces.
_FIRST_CHUNK, _LARGEST_CHUNK = 32, 512
_KEPT_PIECE = 256
# Cuts are first sorted by blocks, and within a block when the search reaches it, so that there are far fewer pieces.
_BLOCK = 32


class Numbered(Protocol):
    """A table whose whole numbers are one array with a row for each column."""

    @property
    def numbers(self) -> Ints:
        """The array, with a row for each column."""


@dataclass(frozen=True)
class Column:
    """A column of a `Numbered` table, by its row in `numbers`."""

    index: int

    def __get__(self, table: Numbered, owner: object = None) -> Ints:
        return np.asarray(table.numbers[self.index])


@dataclass(frozen=True)
class SearchStates:
    """The states as columns: the whole numbers in one array with a row for each column, and the demands."""

    numbers: Ints
    demand: Floats
    times: Floats | None = None
    """The batch times V1 and V2 (`batch_limit`) in seconds, a row for each state; None in the steady state."""
    loads: Floats | None = None
    """Pending loads of shared resources (`shared_resources`) in seconds per minibatch, a row for each state; None if
    contention is not charged."""

    first = Column(0)
    """The column p: the first worker of the first stage behind the cut."""
    level = Column(1)
    """The column λ: the level that the first stage behind the cut spans."""
    stages = Column(2)
    """The number of stages behind the cut."""
    workers = Column(3)
    """The number of busy workers behind the cut."""
    replicas = Column(4)
    """Replicas of the first stage behind the cut."""
    depth = Column(5)
    """Depth of the first stage behind the cut."""
    recompute = Column(6)
    """Whether the first stage behind the cut recomputes its forward pass: 0 or 1."""
    end = Column(7)
    """The cut at which the first stage behind the cut ends."""
    source = Column(8)
    """The row of the state at that cut in front of which the stage was added."""
    ways = Column(9)
    """The class of the first stage's placement by its links (`topology.PlacementTable.ways`); 0 on equal servers."""

    @staticmethod
    def of(columns: dict[str, Ints], demand: Floats, times: Floats | None = None) -> SearchStates:
        """The states with the given columns, by name."""
        nothing = np.zeros(len(demand), dtype=np.intp)
        return SearchStates(np.stack([columns.get(name, nothing) for name in _COLUMNS]), demand, times)

    @staticmethod
    def in_front(
        states: SearchStates, rows: Ints, which: Ints, own: dict[str, Ints], demand: Floats, times: Floats | None
    ) -> SearchStates:
        """The states after stages with the columns `own` have been added in front of the states `which`.

        `rows` are the rows of `states` among the kept states of their cut.
        """
        behind = {
            "stages": states.stages[which] + 1,
            "workers": states.workers[which] + own["replicas"],
            "source": rows[which],
        }
        return SearchStates.of(own | behind, demand, times)

    @staticmethod
    def start(workers: int) -> SearchStates:
        """The state at the full cut: no stage is behind it, there is no demand, and all workers are free."""
        columns = dict.fromkeys(_COLUMNS, np.zeros(1, dtype=np.intp))
        return SearchStates.of(columns | {"first": np.array([workers], dtype=np.intp)}, np.zeros(1))

    @staticmethod
    def join(parts: list[SearchStates]) -> SearchStates:
        """All rows of several parts."""
        if len(parts) == 1:
            return parts[0]
        times = [part.times for part in parts if part.times is not None]
        loads = [part.loads for part in parts if part.loads is not None]
        return SearchStates(
            np.concatenate([part.numbers for part in parts], axis=1),
            np.concatenate([part.demand for part in parts]),
            np.concatenate(times) if times else None,
            np.concatenate(loads) if loads else None,
        )

    def __len__(self) -> int:
        return len(self.demand)

    def take(self, rows: Ints | Flags | slice) -> SearchStates:
        """The selected rows."""
        times = None if self.times is None else self.times[rows]
        loads = None if self.loads is None else self.loads[rows]
        if isinstance(rows, slice):
            return SearchStates(self.numbers[:, rows], self.demand[rows], times, loads)
        places = rows.nonzero()[0] if rows.dtype == np.bool_ else rows
        return SearchStates(self.numbers.take(places, axis=1), self.demand[places], times, loads)

    def moved(self, first: int, replicas: int, loads: Floats) -> SearchStates:
        """The states with another first stage and its pending loads."""
        numbers = self.numbers.copy()
        numbers[_COLUMNS.index("first")], numbers[_COLUMNS.index("replicas")] = first, replicas
        return SearchStates(numbers, self.demand, self.times, loads)


def undominated_rows(count: int, dominates: Callable[[Ints, Ints], Flags]) -> Ints:
    """The rows 0 … count-1 that no earlier row dominates, in increasing order.

    `dominates(some, others)` returns flags of shape (some, others) for two arrays of rows. The rows must be in an order
    in which no row is dominated by a later one, unless both dominate each other. Most searches keep few of very many
    rows, and the best rows come first. So the first chunk is small, and later rows are first compared with the kept
    rows.
    """
    kept: Ints = np.zeros(0, dtype=np.intp)
    begin, size = 0, _FIRST_CHUNK
    while begin < count:
        rows = np.arange(begin, min(begin + size, count))
        for piece in range(0, len(kept), _KEPT_PIECE):
            if not len(rows):
                break
            rows = rows[~dominates(kept[piece : piece + _KEPT_PIECE], rows).any(axis=0)]
        if len(rows) > 1:
            # A row that is dominated by a dropped row is also dominated by the kept row that dominates the latter.
            rows = rows[~np.triu(dominates(rows, rows), 1).any(axis=0)]
        kept = np.concatenate([kept, rows])
        begin, size = begin + size, min(2 * size, _LARGEST_CHUNK)
    return kept


def undominated_states(states: SearchStates, layout: ComponentLayout, counting: StateCounts) -> SearchStates:
    """The states that no other state dominates; of equal states, the first in a fixed order."""
    if not counting.any and states.times is None:
        states = states.take(_least_demands(states, layout.top + 1))
    if states.times is not None:
        places = np.stack([states.first, states.level, states.stages * counting.any, states.workers * counting.any])
        states = states.take(thinned_rows(places, np.stack([states.demand, *states.times.T])))
    if len(states) == 1:
        return states
    counts = (states.stages, states.workers) if counting.any or states.times is None else ()
    order = np.lexsort((states.level, *counts, *time_order(states), states.demand, -states.first))
    states = states.take(order)
    return states.take(
        undominated_rows(len(states), lambda some, others: dominates(states, some, others, layout, counting))
    )


def _least_demands(states: SearchStates, levels: int) -> Ints:
    """For every occurring pair of position and level, a state with the smallest demand."""
    key = states.first * levels + states.level
    key -= key.min()
    size = int(key.max()) + 1
    least = np.full(size, np.inf)
    np.minimum.at(least, key, states.demand)
    best = np.flatnonzero(states.demand == least[key])
    rows = np.full(size, -1, dtype=np.intp)
    # The last assignment wins, so go backwards to keep the first of equal states.
    rows[key[best[::-1]]] = best[::-1]
    return np.sort(rows[rows >= 0])


def dominates(states: SearchStates, some: Ints, others: Ints, layout: ComponentLayout, counting: StateCounts) -> Flags:
    """Flags of shape (some, others): whether each of `some` dominates each of `others`."""
    first, other_first = states.first[some][:, None], states.first[others][None, :]
    joined = np.maximum(states.level[others], layout.joins[states.first[others]])[None, :]
    span = layout.spans[joined]
    result: Flags = states.demand[some][:, None] <= states.demand[others][None, :]
    result &= states.level[some][:, None] <= joined
    result &= (first % span >= other_first % span) | (other_first == 0)
    for level in range(1, layout.top + 1):
        inner, outer = layout.spans[level - 1], layout.spans[level]
        result &= (level <= joined) | (first % outer // inner >= other_first % outer // inner)
    if states.times is not None:
        result &= no_later(states.times, some, others)
    if counting.any:
        result &= no_more(states, some, others, counting)
    return result


def no_more(states: SearchStates, some: Ints, others: Ints, counting: StateCounts) -> Flags:
    """Flags of shape (some, others): whether the first state has no more stages and workers, as far as they count."""
    fewer = np.ones((len(some), len(others)), dtype=bool)
    if counting.exact_stages:
        fewer &= states.stages[some][:, None] == states.stages[others]
    elif counting.stages:
        fewer &= states.stages[some][:, None] <= states.stages[others]
    if counting.workers:
        fewer &= states.workers[some][:, None] <= states.workers[others]
    return fewer


def time_order(states: SearchStates) -> tuple[Floats, ...]:
    """Sort keys of states, least significant first, such that no state can dominate an earlier one."""
    return () if states.times is None else (states.times.sum(axis=1), states.times[:, 0])


def no_later(times: Floats, some: Ints, others: Ints) -> Flags:
    """Flags of shape (some, others): whether a batch from the first state takes no longer, whatever stages are in
    front."""
    return np.asarray((times[some][:, None] <= times[others]).all(axis=2))


def thinned_rows(keys: Ints, criteria: Floats) -> Ints:
    """The columns that remain after dropping those dominated by a few good columns with the same keys.

    In each of the `criteria` (rows), less is better. The good columns are the smallest so far in some criterion.
    Dominated columns may remain.
    """
    key = np.zeros(keys.shape[1], dtype=np.intp)
    for row in keys:
        low = int(row.min(initial=0))
        key = key * (int(row.max(initial=0)) - low + 1) + (row - low)
    order = np.lexsort((*reversed(criteria[:2]), key))
    begins, criteria = group_starts(key[None, order]), criteria[:, order]
    rows = np.arange(len(order))
    lost = ~begins & (criteria[:, rows - 1] <= criteria).all(axis=0)
    for criterion in criteria[1:] if len(criteria) > 1 else criteria:
        rank = np.unique(criterion, return_inverse=True)[1].reshape(-1)
        # The running minimum restarts with every group, because the group's ranks lie below all earlier ones.
        least = np.minimum.accumulate(rank - np.cumsum(begins) * len(order))
        falls = begins.copy()
        falls[1:] |= least[1:] < least[:-1]
        least_row = np.maximum.accumulate(np.where(falls, rows, 0))
        lost |= (least_row < rows) & (criteria[:, least_row] <= criteria).all(axis=0)
    return np.asarray(order[~lost])


def group_starts(keys: Ints) -> Flags:
    """Flags of the columns that differ from the previous column."""
    changed = np.ones(keys.shape[1], dtype=bool)
    changed[1:] = (np.diff(keys, axis=1) != 0).any(axis=0)
    return changed


class StatePool:
    """Holds the waiting states of `cuts` cuts."""

    def __init__(self, cuts: int) -> None:
        self._waiting: dict[int, list[tuple[Ints, SearchStates]]] = {}
        self._open: list[tuple[Ints, SearchStates, int]] = []
        """The states of the block that the search is in, as pairs (piece sorted by cut, number of its states that still
        wait)."""
        self._opened = -(-cuts // _BLOCK)

    def add(self, cuts: Ints, states: SearchStates) -> None:
        """Add states, each at its cut, which must lie before all cuts already taken."""
        order = np.argsort(cuts, kind="stable")
        cuts, states = cuts[order], states.take(order)
        blocks = cuts // _BLOCK
        edges = (np.flatnonzero(np.diff(blocks)) + 1).tolist()
        for begin, end in zip([0, *edges], [*edges, len(cuts)], strict=True):
            piece = slice(begin, end)
            block = int(blocks[begin])
            if block == self._opened:
                self._open.append((cuts[piece], states.take(piece), end - begin))
            else:
                self._waiting.setdefault(block, []).append((cuts[piece], states.take(piece)))

    def take(self, cut: int) -> SearchStates | None:
        """All states at a cut, which must lie before all cuts already taken, or None if there are none."""
        if cut // _BLOCK < self._opened:
            self._opened = cut // _BLOCK
            self._open = self._sorted(self._waiting.pop(self._opened, []))
        parts, waiting = [], []
        for cuts, states, end in self._open:
            begin = end
            # No states of larger cuts wait any more, so the states of this cut are the last.
            if cuts[end - 1] == cut:
                begin = int(cuts.searchsorted(cut))
                parts.append(states.take(slice(begin, end)))
            if begin:
                waiting.append((cuts, states, begin))
        self._open = waiting
        return SearchStates.join(parts) if parts else None

    @staticmethod
    def _sorted(pieces: list[tuple[Ints, SearchStates]]) -> list[tuple[Ints, SearchStates, int]]:
        """All pieces as one, sorted by cut."""
        if not pieces:
            return []
        cuts = np.concatenate([cuts for cuts, _ in pieces])
        states = SearchStates.join([states for _, states in pieces])
        order = np.argsort(cuts, kind="stable")
        return [(cuts[order], states.take(order), len(order))]
