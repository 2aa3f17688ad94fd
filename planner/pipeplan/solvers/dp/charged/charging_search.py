"""The search over candidate placements with the loads of shared cards, ports and cores charged to every stage.

It extends the searches of `heterogeneous_search` and `flush.heterogeneous_flush`, for uniform clusters as well: a state
also has the pending loads of the components in which its first stage begins (`shared_resources`). Two states of one cut
then compare only where no stage in front can tell them apart. At every level that charges something, the component of
the dominated state's first worker is either closed, because that worker is its first, or it is the same component, with
no more load pending, and the receivers in it are the same share of their stage.

Idle workers. A stage that ends before an idle worker of the server of its last worker can move by one worker, unless it
straddles servers: it would then have more replicas on the card of the one and fewer on that of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK
from pipeplan.solvers.dp.charged.shared_resources import SharedResources
from pipeplan.solvers.dp.states.search_states import (
    SearchStates,
    group_starts,
    thinned_rows,
    time_order,
    undominated_rows,
)
from pipeplan.solvers.dp.steady.heterogeneous_search import HeterogeneousSearch
from pipeplan.solvers.dp.terms.stage_terms import StageTerms

AT_ONCE = 1_000_000
"""The number of pairs of a stage and a placement that are looked at a time."""


@dataclass(frozen=True)
class SharedLimit:
    """The most seconds per minibatch that any shared resource may be busy."""

    resources: SharedResources
    limit_s: float

    @property
    def within(self) -> float:
        """The limit with slack for rounding."""
        return self.limit_s * (1 + SLACK)


class ChargingSearch(HeterogeneousSearch):
    """The part of the search that charges shared resources, for the steady state and for flush schedules."""

    shared: SharedLimit

    def start(self) -> SearchStates:
        """The initial state, with nothing pending."""
        return replace(super().start(), loads=np.zeros((1, self.shared.resources.columns)))

    # -- extension --

    def _extend(self, cut: int, states: SearchStates) -> Iterator[tuple[Ints, SearchStates]]:
        states, rows = self.open_states(states)
        targets = self._leading(cut)
        if not len(states) or not len(targets):
            return
        begins = self.terms.runs.begins
        # No state has more placements in front of it than there are in all up to its first worker.
        most = np.cumsum(begins[states.first + 1] - begins[self.lowest[cut]])
        edges = [0, *(np.flatnonzero(np.diff(most // AT_ONCE)) + 1).tolist(), len(states)]
        variants = (False, True) if self.limits.recompute else (False,)
        stages = [StageTerms.of(self.terms, cut, targets, recompute=one) for one in variants]
        for begin, stop in itertools.pairwise(edges):
            yield from self._extend_some(cut, stages, states.take(slice(begin, stop)), rows[begin:stop])

    def _extend_some(
        self, cut: int, stages: list[StageTerms], states: SearchStates, rows: Ints
    ) -> Iterator[tuple[Ints, SearchStates]]:
        """Every state that some stages in front of some states lead to."""
        which, runs = self._pairs(cut, states)
        transfer, allowed = self._boundary_times(cut, states, which, runs)
        which, runs, transfer = which[allowed], runs[allowed], transfer[allowed]
        if not len(runs):
            return
        kinds, kind = self._kinds(runs, states.demand[which], transfer)
        useful = self._useful(stages, kinds)[kind]
        which, runs, kind = which[useful], runs[useful], kind[useful]
        behind = self.shared.resources.behind(cut, states, which, runs)
        allowed = behind.peak <= self.shared.within
        which, runs, kind, busy = which[allowed], runs[allowed], kind[allowed], behind.busy[:, allowed]
        if not len(runs):
            return
        for stage in stages:
            for target, pair, depth, demand in self._stages(stage, kinds, kind):
                chosen = which[pair], runs[pair], depth, demand
                yield from self._charged(stage, states, rows, target, busy[:, pair], *chosen)

    def _useful(self, stages: list[StageTerms], kinds: tuple[Floats, Ints, Floats]) -> Flags:
        """Whether any of some stages may be fast and small enough, for every kind of pair."""
        return np.ones(len(kinds[1]), dtype=bool)

    def _stages(
        self, stage: StageTerms, kinds: tuple[Floats, Ints, Floats], kind: Ints
    ) -> Iterator[tuple[Ints, Ints, Floats, Floats]]:
        """The stages that are fast and small enough: row of the cut, pair of a state and a placement, depth, demand."""
        size = max(1, AT_ONCE // len(kind))
        for begin in range(0, len(stage.targets), size):
            some = stage.take(np.arange(begin, min(begin + size, len(stage.targets))))
            self.limits.step(len(kind) * len(some.targets) / 8)
            for depth, demand in self._sizes(some, *kinds):
                target, pair = np.nonzero(np.isfinite(demand)[:, kind])
                yield begin + target, pair, depth[target, kind[pair]], demand[target, kind[pair]]

    def _kinds(self, runs: Ints, behind: Floats, transfer: Floats) -> tuple[tuple[Floats, Ints, Floats], Ints]:
        """The pairs that differ in what sizes a stage (demand behind, placement, transfer), and the kind of each pair.

        Stages are sized once for each kind. Where depths do not count, only the placement matters.
        """
        if not self.limits.memory and self.terms.accumulate is None:
            placements, kind = np.unique(runs, return_inverse=True)
            nothing = np.zeros(len(placements))
            return (nothing, placements, nothing), kind.reshape(-1)
        order = np.lexsort((transfer, behind, runs))
        begins = group_starts(np.stack([runs, behind, transfer])[:, order])
        kind = np.empty(len(runs), dtype=np.intp)
        kind[order] = np.cumsum(begins) - 1
        one = order[begins]
        return (behind[one], runs[one], transfer[one]), kind

    def _pairs(self, cut: int, states: SearchStates) -> tuple[Ints, Ints]:
        """Every state with every placement that may lie in front of it, by index."""
        cluster, table = self.terms.problem.cluster, self.terms.runs
        if self.limits.shape is not None:
            which, runs = table.with_ends(states.first)
            in_shape = table.replicas[runs] == self.limits.shape.replicas
            return which[in_shape], runs[in_shape]
        edges = np.zeros(cluster.workers + 1, dtype=bool)
        edges[np.array(cluster.starts(1))] = True
        straddles = np.zeros(len(table.first), dtype=bool)
        for level in self.shared.resources.levels:
            straddles |= level.first != level.last
        anywhere = straddles | edges[table.end]
        positions, position = np.unique(states.first, return_inverse=True)
        # The stages in front of the cut have no room before this worker.
        lowest = int(table.begins[self.lowest[cut]])
        groups, placements = [], []
        for index, first in enumerate(positions.tolist()):
            before = lowest + np.flatnonzero(anywhere[lowest : table.begins[first]])
            mine = np.concatenate([np.arange(table.begins[first], table.begins[first + 1]), before])
            same = np.flatnonzero(position == index)
            groups.append(np.repeat(same, len(mine)))
            placements.append(np.tile(mine, len(same)))
        return np.concatenate(groups), np.concatenate(placements)

    def _charged(
        self,
        stage: StageTerms,
        states: SearchStates,
        rows: Ints,
        target: Ints,
        busy: Floats,
        which: Ints,
        runs: Ints,
        depth: Floats,
        demand: Floats,
    ) -> Iterator[tuple[Ints, SearchStates]]:
        """The new states whose shared resources keep within the limit, thinned out for each of their cuts."""
        if not len(target):
            return
        columns = self._columns(stage, states, rows, which, runs)
        columns.numbers[5] = depth
        times = self._placed_times(stage, states, target, which, runs, depth)
        new_states = replace(columns, demand=demand, times=times)
        completable = self.can_complete(stage.targets[target], new_states)
        target, runs, new_states = target[completable], runs[completable], new_states.take(completable)
        if not len(target):
            return
        peak, loads = self.shared.resources.in_front(stage, target, runs, busy[:, completable])
        allowed = peak <= self.shared.within
        target, new_states = target[allowed], replace(new_states.take(allowed), loads=loads[allowed])
        if len(target):
            kept = thinned_rows(np.vstack([target, self._keys(new_states)]), np.stack(self._criteria(new_states)))
            yield stage.targets[target[kept]], new_states.take(kept)

    # -- dominance --

    def _keys(self, states: SearchStates) -> Ints:
        keys = super()._keys(states)
        if self.terms.parallel:
            return keys
        # The replicas matter where some of them lie in another component than the first.
        straddles = np.zeros(len(states), dtype=bool)
        for level in self.shared.resources.levels:
            if level.is_card:
                component = level.component[states.first]
                beyond = states.first + states.replicas > level.stop[component]
                straddles |= beyond & (states.first > level.start[component])
        return np.vstack([keys, np.where(straddles, states.replicas, 0)])

    def _thinned(self, states: SearchStates) -> Ints:
        return thinned_rows(self._keys(states), np.stack(self._criteria(states)))

    @staticmethod
    def _criteria(states: SearchStates) -> list[Floats]:
        """The columns of which less is better: the demand, the sum and the loads, each once."""
        assert states.loads is not None
        found = [states.demand]
        for values in [*([] if states.times is None else states.times.T), *states.loads.T]:
            if not any(np.array_equal(values, other) for other in found):
                found.append(np.asarray(values))
        return found

    def _undominated(self, cut: int, waiting: SearchStates) -> SearchStates:
        states = waiting.take(self._thinned(waiting))
        if len(states) == 1:
            return states
        assert states.loads is not None
        counts = states.level, -states.replicas, states.workers, states.stages
        order = np.lexsort((*counts, states.loads.sum(axis=1), *time_order(states), states.demand, -states.first))
        states = states.take(order)
        places = self._places_of(cut, states)

        def dominates(some: Ints, others: Ints) -> Flags:
            better = self._dominates(states, some, others)
            for place in places:
                better &= place.no_worse(some, others)
            return better

        return states.take(undominated_rows(len(states), dominates))

    def _places_of(self, cut: int, states: SearchStates) -> list[_Places]:
        """How the states lie on each level that charges something."""
        resources, places, column = self.shared.resources, [], 0
        assert states.loads is not None
        for level in resources.levels:
            component = level.component[states.first]
            edge = states.first == level.start[component]
            width = 2 if level.is_card else 1
            places.append(
                _Places(
                    level.is_card,
                    states.first,
                    states.replicas,
                    component,
                    edge,
                    states.first + states.replicas <= level.stop[component],
                    edge | (resources.closing_load(cut, states, level, column) <= self.shared.within),
                    states.loads[:, column : column + width],
                )
            )
            column += width
        return places


@dataclass(frozen=True)
class _Places:
    """How states lie on one level that charges something, as arrays over the states."""

    is_card: bool
    first: Ints
    replicas: Ints
    component: Ints
    """The component of the first worker."""
    edge: Flags
    """Whether that worker is the first of its component."""
    inside: Flags
    """Whether the whole stage lies in that component."""
    closed: Flags
    """Whether the component keeps within the limit where no other stage uses it."""
    loads: Floats

    def no_worse(self, some: Ints, others: Ints) -> Flags:
        """Flags of shape (some, others): whether no stage in front finds less room on some states than on others."""
        component, other = self.component[some][:, None], self.component[others]
        no_more = np.ones((len(some), len(other)), dtype=bool)
        for column in range(self.loads.shape[1]):
            no_more &= self.loads[some, column][:, None] <= self.loads[others, column]
        if not self.is_card:
            return np.asarray(self.edge[others] | (component > other) | ((component == other) & no_more))
        same = self.first[some][:, None] == self.first[others]
        same &= self.replicas[some][:, None] == self.replicas[others]
        alike = (self.inside[some][:, None] & self.inside[others]) | same
        return np.where(self.edge[others], self.closed[some][:, None], (component == other) & no_more & alike)
