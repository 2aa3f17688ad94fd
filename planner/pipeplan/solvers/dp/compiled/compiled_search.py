"""Finds the states of a steady-state search on equal servers cut by cut, with compiled loops.

The array code of `uniform_search` spreads the states of a cut to all cuts in front of it, many at a time. The loops
collect the states of a cut from all cuts behind it, one at a time, so that no state has to wait for its cut. Both come
to the same states, so either can go on where the other is.
"""

from __future__ import annotations

import numpy as np

from pipeplan.problem.cuts import Floats, Ints
from pipeplan.solvers.dp.compiled import cut_loops, front_loops
from pipeplan.solvers.dp.compiled.cut_loops import Found, Places, fewest_states, put_places, sized_states
from pipeplan.solvers.dp.compiled.loop_inputs import Search, arrays_of, numbers_of
from pipeplan.solvers.dp.search_states import SearchStates

_FIRST_ROOM = 1024
"""Rows for which there is room at first."""


class CompiledSearch:
    """The states of a search, which has kept those of some cuts, from the full one on."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._given, self._arrays = numbers_of(search), arrays_of(search)
        levels, counting = search.layout.top + 1, search.limits.counting
        self._places = _PlaceTable(search.last + 1, levels)
        self._found = _room_for(_FIRST_ROOM)
        self._intervals = np.zeros((levels, 2, 4))
        rows = 0 if search.counts_depths else search.last + 1
        self._fewest, self._fewest_below = np.zeros((rows, levels)), np.zeros((rows, levels))
        self._fewest_of = search.last
        fewer = front_loops.FEWER_STAGES if counting.stages else front_loops.ALIKE
        self._stages = front_loops.EXACT_STAGES if counting.exact_stages else fewer
        for cut in sorted(search.kept, reverse=True):
            self.spread(cut, search.kept[cut])

    def take(self, cut: int) -> SearchStates | None:
        """The undominated states at a cut, or None if there are none."""
        search = self._search
        if cut == search.last:
            search.limits.step(1)
            return search.start()
        if not search.usable[cut]:
            return None
        states = search.completable(np.full(len(found := self._find(cut)), cut), found)[1]
        if not len(states):
            return None
        search.limits.step(len(states))
        front, layout, workers = np.zeros(len(states), dtype=np.intp), search.layout, search.limits.counting.workers
        kept = front_loops.undominated(
            states.numbers, states.demand, layout.joins, layout.spans, self._stages, workers, front
        )
        states = states.take(front[:kept])
        states.numbers[front_loops.ORDER] = 0
        return states

    def spread(self, cut: int, states: SearchStates) -> None:
        """Take in the states at a cut, on which those of further cuts build."""
        search, (states, rows) = self._search, self._search.open_states(states)
        if not len(states):
            return
        bound = np.zeros(len(rows), dtype=np.intp) if search.bounds is None else search.bounds.rows_of(states.demand)
        columns = np.stack([rows, states.first, states.level, states.stages, states.workers, bound], axis=1)
        widest = -1 if cut == search.last else int(search.widest[cut])
        self._places.add(columns, states.demand, cut, widest, search)

    def _find(self, cut: int) -> SearchStates:
        """All states at a cut, in some order."""
        places = self._places.places
        while True:
            if self._search.counts_depths:
                need = self._memory_need(cut)
                count = sized_states(cut, self._given, self._arrays, places, need, self._found, self._intervals)
            else:
                known, below = self._known_fewest(cut)
                inputs = self._given, self._arrays, places, self._found, self._intervals
                count = fewest_states(cut, *inputs, known, below)
            if count <= len(self._found.demand):
                return SearchStates(self._found.numbers[:, :count], self._found.demand[:count])
            self._found = _room_for(2 * count)

    def _memory_need(self, cut: int) -> Floats:
        """The least workers in front of a cut that memory needs, by place."""
        bounds, count = self._search.bounds, self._places.count
        if bounds is None:
            return np.asarray(self._search.workers_for_memory(np.array([cut]), self._places.places.demand[:count])[0])
        return np.asarray(bounds.table[self._places.places.numbers[:count, cut_loops.BOUND], cut])

    def _known_fewest(self, cut: int) -> tuple[Floats, Floats]:
        """The fewest replicas as far as they are known, for stages that begin at a cut and at the one before it."""
        if self._fewest_of != cut:
            self._fewest, self._fewest_below = self._fewest_below, self._fewest
            if self._fewest_of != cut + 1:
                self._fewest[:] = 0.0
            self._fewest_of = cut
        self._fewest_below[:] = 0.0
        return self._fewest, self._fewest_below


class _PlaceTable:
    """The rows of `Places`, which grow in number."""

    def __init__(self, cuts: int, levels: int) -> None:
        begins, ends = np.zeros((2, cuts), dtype=np.intp)
        numbers = np.zeros((_FIRST_ROOM, cut_loops.ROOM + levels), dtype=np.intp)
        self.places = Places(begins, ends, numbers, np.zeros(_FIRST_ROOM))
        self.count = 0
        self._levels = levels

    def add(self, behind: Ints, demand: Floats, cut: int, widest: int, search: Search) -> None:
        """Add the places in front of the states at a cut, given their first columns."""
        begin, room = self.count, self.count + len(behind) * self._levels
        while room > len(self.places.demand):
            numbers, demands = self.places.numbers, self.places.demand
            grown = np.concatenate([numbers, np.zeros_like(numbers)]), np.concatenate([demands, np.zeros_like(demands)])
            self.places = self.places._replace(numbers=grown[0], demand=grown[1])
        most, idle = search.terms.most_replicas, search.limits.shape is None
        self.count = put_places(behind, demand, widest, most, search.layout.spans, self.places, cut, begin, idle)


def _room_for(states: int) -> Found:
    return Found(np.zeros((front_loops.ORDER + 1, states), dtype=np.intp), np.zeros(states))
