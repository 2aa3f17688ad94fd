"""The search over cuts with all candidate placements, for servers that differ, parallel links, and contention.

If servers differ, positions in the cluster are not interchangeable. So the search tries a stage in front of a state on
every run of consecutive workers. Let m = max(λ, level(p-1, p)). A state (p', λ') with no larger demand dominates the
state (p, λ) at the same cut under three conditions. First, p' ≥ p. Second, the component of level λ' that contains p'
lies within the component of level m that contains p. Third, the links from the stage of p' up to level m and to every
level above are no slower than the links from the stage of p (`PlacementTable.no_slower`). Any stage that can be in
front of p can then be in front of p', and the component that joins the two stages is no larger.

If contention is charged, a state also has the pending loads of the components in which its first stage begins
(`shared_resources`). To dominate another state, a state must then meet one of two conditions at every level that
charges something. Either the first worker of the dominated state is the first worker of its component, and the
dominating state's component is closed. Or both states begin in the same component, the dominating state has no more
pending load there, and the same share of the first stage's replicas lies in it.

A stage ends right before the state behind it or at the end of a server. Otherwise the worker e behind its last worker
e - 1 is idle and on the same server, and the stage can move by one worker, because workers of a server are equal.
If cards are charged, a stage that straddles servers may end anywhere, because such a move changes how many replicas use
each server's card.

In the steady state, a stage on a placement can begin only within a window of cuts, so only these cuts are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK, SearchLimits
from pipeplan.solvers.dp.search.cost_terms import AnyInputStage
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.resource_levels import PlacedLoads
from pipeplan.solvers.dp.search.shared_resources import SharedResources
from pipeplan.solvers.dp.search.stage_terms import StageTerms
from pipeplan.solvers.dp.search.states import (
    SearchStates,
    group_starts,
    no_later,
    no_more,
    thinned_rows,
    time_order,
    undominated_rows,
)
from pipeplan.solvers.dp.search.uniform_search import UniformSearch

AT_ONCE = 1_000_000
"""Number of pairs (stage, placement) that are processed at a time."""


@dataclass(frozen=True)
class SharedLimit:
    """The limit on the busy time of every shared resource, in seconds per minibatch."""

    resources: SharedResources
    limit_s: float

    @property
    def within(self) -> float:
        """The limit with a tolerance for rounding."""
        return self.limit_s * (1 + SLACK)


class PlacementSearch(UniformSearch):
    """The search for a pipeline within one threshold over all candidate placements, in the steady state."""

    terms: HeterogeneousTerms

    def __init__(
        self, terms: HeterogeneousTerms, threshold: float, limits: SearchLimits, shared: SharedLimit | None = None
    ) -> None:
        self.terms, self.limits, self.shared = terms, limits, shared
        self.threshold, self.within = threshold, threshold * (1 + SLACK)
        self.last = len(terms.cuts.ideals) - 1
        self.kept: dict[int, SearchStates] = {}
        # The layers before a cut need enough speed in front of it for their work, and at least one worker.
        speed = terms.cuts.work_s / self.within * (1 - 1e-9)
        self.lowest = np.maximum(np.searchsorted(terms.speed_before, speed), 1).astype(np.intp)
        self.need = np.maximum(np.ceil(speed / terms.fastest), 1).astype(np.intp)
        self.lowest[0] = self.need[0] = 0
        self.most_demand, self.bounds = self._most_demand(), None

    def start(self) -> SearchStates:
        """The initial state, without pending loads."""
        start = super().start()
        return start if self.shared is None else replace(start, loads=np.zeros((1, self.shared.resources.columns)))

    # -- extension --

    def _extend(self, cut: int, states: SearchStates) -> Iterator[tuple[Ints, SearchStates]]:
        """The states that result from adding a stage in front of these states, each with its cut."""
        states, rows = self.open_states(states)
        targets = self._leading(cut)
        if not len(states) or not len(targets):
            return
        begins = self.terms.runs.begins
        # A state has at most as many placements in front of it as there are in all up to its first worker.
        most = np.cumsum(begins[states.first + 1] - begins[self.lowest[cut]])
        edges = [0, *(np.flatnonzero(np.diff(most // AT_ONCE)) + 1).tolist(), len(states)]
        variants = (False, True) if self.limits.recompute else (False,)
        stages = [StageTerms.of(self.terms, cut, targets, recompute=one) for one in variants]
        for begin, stop in itertools.pairwise(edges):
            yield from self._extend_some(cut, stages, states.take(slice(begin, stop)), rows[begin:stop])

    def _extend_some(
        self, cut: int, stages: list[StageTerms], states: SearchStates, rows: Ints
    ) -> Iterator[tuple[Ints, SearchStates]]:
        """The states that result from adding `stages` in front of `states`."""
        which, runs = self._pairs(cut, states)
        transfer, allowed = self._boundary_times(cut, states, which, runs)
        which, runs, transfer = which[allowed], runs[allowed], transfer[allowed]
        if not len(runs):
            return
        kinds, kind = self._kinds(runs, states.demand[which], transfer)
        useful = self._useful(stages, kinds)[kind]
        which, runs, kind = which[useful], runs[useful], kind[useful]
        busy: Floats | None = None
        if self.shared is not None:
            behind = self.shared.resources.behind(cut, states, which, runs)
            allowed = behind.peak <= self.shared.within
            which, runs, kind, busy = which[allowed], runs[allowed], kind[allowed], behind.busy[:, allowed]
        if not len(runs):
            return
        for stage in stages:
            for target, pair, depth, demand in self._stages(stage, kinds, kind):
                chosen = which[pair], runs[pair], depth, demand
                loads = None if busy is None else busy[:, pair]
                yield from self._new_states(stage, states, rows, target, loads, *chosen)

    def _useful(self, stages: list[StageTerms], kinds: tuple[Floats, Ints, Floats]) -> Flags:
        """Whether any of these stages may be fast and small enough, for every kind of pair."""
        return np.asarray(np.logical_or.reduce([self._windows(stage, *kinds)[2] > 0 for stage in stages]))

    def _stages(
        self, stage: StageTerms, kinds: tuple[Floats, Ints, Floats], kind: Ints
    ) -> Iterator[tuple[Ints, Ints, Floats, Floats]]:
        """The stages that are fast and small enough, as (row of the cut, pair of state and placement, depth,
        demand)."""
        behind, runs, transfer = kinds
        order, begins, counts = self._windows(stage, *kinds)
        pairs = _Groups.of(kind, len(runs))
        chunks = np.flatnonzero(np.diff(np.cumsum(counts) // AT_ONCE, prepend=-1, append=-1)).tolist()
        for begin, stop in itertools.pairwise(chunks):
            self._count(stage, int(counts[begin:stop].sum()))
            which, place = _ranges(begins[begin:stop], counts[begin:stop])
            row, one = order[place], begin + which
            depth, demand = self._sized(stage.take(row), behind[one], runs[one], transfer[one])
            fits = np.flatnonzero(np.isfinite(demand))
            element, pair = pairs.members(one[fits])
            element = fits[element]
            sort = np.lexsort((pair, row[element]))
            element, pair = element[sort], pair[sort]
            yield row[element], pair, depth[element], demand[element]

    def _count(self, stage: StageTerms, rows: float) -> None:
        """Count a step through `rows` rows. Stages with recomputation are not counted again."""
        if not stage.recompute:
            self.limits.step(rows)

    def _windows(self, stage: StageTerms, behind: Floats, runs: Ints, transfer: Floats) -> tuple[Ints, Ints, Ints]:
        """The cuts at which a stage on each placement may begin: an order of all cuts, and first index and length of a
        window in it.

        In the window, a stage's replicas can do its work, memory suffices for its depth without waits for all-reduces,
        and there are enough workers in front of it.
        """
        table, work_s = self.terms.runs, self.terms.cuts.work_s
        order = np.argsort(work_s[stage.begin], kind="stable")
        sizes, lowest = work_s[stage.begin][order], np.maximum.accumulate(self.lowest[stage.begin][order])
        most = table.replicas[runs] * table.speed[runs] * self.within * (1 + SLACK)
        begins = np.searchsorted(sizes, work_s[stage.end] * (1 - SLACK) - most)
        if self.limits.memory and self.terms.training and self.terms.problem.cluster.uniform:
            depth = np.ones(len(runs))
            if not stage.is_last:
                depth = formulas.in_flight_depth(behind, 0.0, transfer, self.threshold, table.replicas[runs])
            for several in (False, True):
                deepest = np.maximum.accumulate(stage.deepest(replicated=several)[order])
                within = np.searchsorted(deepest, depth)
                begins = np.where((table.replicas[runs] > 1) == several, np.maximum(begins, within), begins)
        ends = np.searchsorted(lowest, table.first[runs], side="right")
        return order, begins, np.maximum(ends - begins, 0)

    def _kinds(self, runs: Ints, behind: Floats, transfer: Floats) -> tuple[tuple[Floats, Ints, Floats], Ints]:
        """The distinct kinds of pairs (demand behind, placement, transfer), and the kind of each pair.

        Stages are sized once for each kind. If depths do not matter, only the placement counts.
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
        """All pairs of a state and a placement that may lie in front of it, by index."""
        cluster, table = self.terms.problem.cluster, self.terms.runs
        if self.limits.shape is not None:
            which, runs = table.with_ends(states.first)
            in_shape = table.replicas[runs] == self.limits.shape.replicas
            return which[in_shape], runs[in_shape]
        edges = np.zeros(cluster.workers + 1, dtype=bool)
        edges[np.array(cluster.starts(1))] = True
        straddles = np.zeros(len(table.first), dtype=bool)
        for level in () if self.shared is None else self.shared.resources.levels:
            straddles |= level.first != level.last
        anywhere = straddles | edges[table.end]
        positions, position = np.unique(states.first, return_inverse=True)
        # The stages in front of the cut need the workers before this one.
        lowest = int(table.begins[self.lowest[cut]])
        groups, placements = [], []
        for index, first in enumerate(positions.tolist()):
            before = lowest + np.flatnonzero(anywhere[lowest : table.begins[first]])
            mine = np.concatenate([np.arange(table.begins[first], table.begins[first + 1]), before])
            same = np.flatnonzero(position == index)
            groups.append(np.repeat(same, len(mine)))
            placements.append(np.tile(mine, len(same)))
        return np.concatenate(groups), np.concatenate(placements)

    def _rates(self, cut: int, states: SearchStates, which: Ints, runs: Ints) -> tuple[Floats, Floats, Ints]:
        """Bandwidth and latency from a placement to the state behind it, and the number of links."""
        table = self.terms.runs
        if cut == self.last:
            return np.full(len(runs), np.inf), np.zeros(len(runs)), np.ones(len(runs), dtype=np.intp)
        first = table.first[runs]
        joined = np.maximum(self.terms.between[first, states.first[which]], states.level[which])
        links = np.ones(len(runs), dtype=np.intp)
        if self.terms.parallel:
            links = np.minimum(table.replicas[runs], states.replicas[which])
        return *self.terms.rates_between(joined, table.ways[runs], states.ways[which]), links

    def _boundary_times(self, cut: int, states: SearchStates, which: Ints, runs: Ints) -> tuple[Floats, Flags]:
        """(one-way time from a placement to the state behind it, whether the boundary is fast enough)."""
        bandwidth, latency, links = self._rates(cut, states, which, runs)
        allowed = self._quick_boundary(cut, bandwidth, links) & self.terms.usable[runs]
        if self.limits.max_workers is not None:
            busy = states.workers[which] + self.terms.runs.replicas[runs]
            allowed = allowed & (busy <= self.limits.max_workers)
        return np.asarray(formulas.transfer_time(self.terms.busier(cut), bandwidth, latency)), allowed

    def _quick_boundary(self, cut: int, bandwidth: Floats, links: Ints) -> Flags:
        quick: Flags = formulas.boundary_time(self.terms.busier(cut), bandwidth, links) <= self.within
        return quick

    def _sized(self, stage: StageTerms, behind: Floats, runs: Ints, transfer: Floats) -> tuple[Floats, Floats]:
        """Depth and demand of stages on the placements of the same index; infinite if a stage is too slow or too
        large."""
        terms, table = self.terms, self.terms.runs
        replicas = table.replicas[runs]
        time, group = terms.stage_s(stage, runs)
        allowed = (time <= self.within) & (table.first[runs] >= self.lowest[stage.begin])
        depth, wait = np.ones(time.shape), np.zeros(time.shape)
        counted = terms.training and (self.limits.memory or terms.accumulate is not None)
        if counted and terms.accumulate is None:
            wait = np.broadcast_to(
                formulas.group_wait(group, self.threshold, replicas, terms.problem.copies), time.shape
            )
        if counted and not stage.is_last:
            depth = formulas.in_flight_depth(behind, wait, transfer, self.threshold, replicas)
        if counted and terms.accumulate is not None:
            allowed &= self.two_versions_suffice(depth * replicas, group)
        if self.limits.memory:
            allowed &= self._fits(stage, runs, depth, pairs=True)
        depth = np.where(allowed, depth, np.inf)
        demand = formulas.in_flight_behind(depth, replicas, wait) if counted else np.where(allowed, 0.0, np.inf)
        return depth, demand

    def _fits(self, stage: StageTerms, runs: Ints, depth: Floats, *, pairs: bool = False) -> Flags:
        """Whether each stage at its depth fits into the smallest memory of each placement.

        With `pairs` every stage is on the placement of the same index; otherwise stages are rows and placements are
        columns.
        """
        replicas, first = self.terms.runs.replicas[runs], self.terms.first
        rows = ... if pairs else (slice(None), None)
        fixed = stage.fixed_bytes(replicas, rows)
        if first is not None and not isinstance(first, AnyInputStage):
            fixed = np.where((stage.begin == 0)[rows] & (replicas != first.replicas), np.inf, fixed)
        within: Flags = fixed + stage.growing_bytes[rows] * depth <= self.terms.runs.memory[runs] * (1 + SLACK)
        return within

    def _new_states(
        self,
        stage: StageTerms,
        states: SearchStates,
        rows: Ints,
        target: Ints,
        busy: Floats | None,
        which: Ints,
        runs: Ints,
        depth: Floats,
        demand: Floats,
    ) -> Iterator[tuple[Ints, SearchStates]]:
        """The new states whose shared resources stay within the limit, thinned out at each cut.

        `busy` has the loads behind the stages; None if contention is not charged.
        """
        if not len(target):
            return
        table = self.terms.runs
        own = {
            "first": table.first[runs],
            "level": table.span[runs],
            "replicas": table.replicas[runs],
            "depth": depth.astype(np.intp),
            "recompute": np.full(len(runs), int(stage.recompute)),
            "end": stage.ends[target],
            "ways": table.ways[runs],
        }
        times = self._placed_times(stage, states, target, which, runs)
        new_states = SearchStates.in_front(states, rows, which, own, demand, times)
        completable = self.can_complete(stage.begin[target], new_states)
        target, runs, new_states = target[completable], runs[completable], new_states.take(completable)
        if not len(target):
            return
        if self.shared is not None and busy is not None:
            peak, loads = self.shared.resources.in_front(stage, target, runs, busy[:, completable])
            allowed = peak <= self.shared.within
            target, new_states = target[allowed], replace(new_states.take(allowed), loads=loads[allowed])
        if len(target):
            kept = thinned_rows(np.vstack([target, self._keys(new_states)]), np.stack(self._criteria(new_states)))
            yield stage.begin[target[kept]], new_states.take(kept)

    def _placed_times(
        self, stage: StageTerms, states: SearchStates, target: Ints, which: Ints, runs: Ints
    ) -> Floats | None:
        """The batch times of new states; None in the steady state."""
        return None

    # -- dominance --

    def _undominated(self, cut: int, waiting: SearchStates) -> SearchStates:
        """The states that no other state dominates; of equal states, the first in a fixed order."""
        states = waiting.take(thinned_rows(self._keys(waiting), np.stack(self._criteria(waiting))))
        if len(states) == 1:
            return states
        counts = states.level, -states.replicas, states.workers, states.stages
        loads = () if states.loads is None else (states.loads.sum(axis=1),)
        order = np.lexsort((*counts, *loads, *time_order(states), states.demand, -states.first))
        states = states.take(order)
        places = self._places_of(cut, states)

        def dominates(some: Ints, others: Ints) -> Flags:
            better = self._dominates(states, some, others)
            for place in places:
                better &= place.no_worse(some, others)
            return better

        return states.take(undominated_rows(len(states), dominates))

    @staticmethod
    def _criteria(states: SearchStates) -> list[Floats]:
        """The columns for which less is better: the demand, the times and the loads."""
        found = [states.demand]
        tables = [table for table in (states.times, states.loads) if table is not None]
        for values in (column for table in tables for column in table.T):
            if not any(np.array_equal(values, other) for other in found):
                found.append(np.asarray(values))
        return found

    def _keys(self, states: SearchStates) -> Ints:
        """The columns that must be equal for states to be compared, as rows."""
        counting = self.limits.counting
        rows = [states.first, states.level, states.ways]
        rows += [states.replicas] if self.terms.parallel else []
        rows += [states.stages] if counting.stages or counting.exact_stages else []
        rows += [states.workers] if counting.workers else []
        if self.shared is None or self.terms.parallel:
            return np.stack(rows)
        # The number of replicas matters if some of them lie in another component than the first.
        straddles = np.zeros(len(states), dtype=bool)
        for level in self.shared.resources.levels:
            if level.is_card:
                component = level.component[states.first]
                beyond = states.first + states.replicas > level.stop[component]
                straddles |= beyond & (states.first > level.start[component])
        return np.stack([*rows, np.where(straddles, states.replicas, 0)])

    def _dominates(self, states: SearchStates, some: Ints, others: Ints) -> Flags:
        """Flags of shape (some, others): whether each state of `some` dominates each of `others`."""
        between = self.terms.between
        mine, first = states.first[some][:, None], states.first[others]
        joined = np.where(first > 0, between[first - 1, first], len(self.terms.problem.cluster.levels))
        joined = np.maximum(joined, states.level[others])
        result: Flags = states.demand[some][:, None] <= states.demand[others]
        result &= mine >= first
        result &= (states.level[some][:, None] <= joined) & (between[mine, first] <= joined)
        if states.times is not None:
            result &= no_later(states.times, some, others)
        result &= self.terms.runs.no_slower[joined, states.ways[some][:, None], states.ways[others]]
        if self.terms.parallel:
            result &= states.replicas[some][:, None] >= states.replicas[others]
        if self.limits.counting.any:
            result &= no_more(states, some, others, self.limits.counting)
        return result

    def _places_of(self, cut: int, states: SearchStates) -> list[PlacedLoads]:
        """The position and loads of the states on each level that charges something."""
        if self.shared is None or states.loads is None:
            return []
        resources, places, column = self.shared.resources, list[PlacedLoads](), 0
        for level in resources.levels:
            component = level.component[states.first]
            edge = states.first == level.start[component]
            width = 2 if level.is_card else 1
            places.append(
                PlacedLoads(
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
class _Groups:
    """Elements (by index) grouped by kind."""

    order: Ints
    """The elements, sorted by kind."""
    begins: Ints
    counts: Ints

    @staticmethod
    def of(kind: Ints, kinds: int) -> _Groups:
        """Group elements, given the kind of each and the number of kinds."""
        counts = np.bincount(kind, minlength=kinds)
        return _Groups(np.argsort(kind, kind="stable"), np.cumsum(counts) - counts, counts)

    def members(self, kinds: Ints) -> tuple[Ints, Ints]:
        """All elements of `kinds`, as (index of the kind in the list, element)."""
        which, place = _ranges(self.begins[kinds], self.counts[kinds])
        return which, self.order[place]


def _ranges(begins: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """The members of ranges of whole numbers, as (index of the range, number)."""
    which = np.repeat(np.arange(len(begins)), counts)
    before = np.cumsum(counts) - counts
    return which, np.arange(len(which)) - before[which] + begins[which]
