"""Replica counts and depths of candidate stages on equal servers for one threshold, for many stages at once.

A candidate stage is a pair (end position, cut at which the stage begins).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK, SearchLimits
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.replicas import ReplicaIntervals
from pipeplan.solvers.dp.search.stage_terms import StageTerms
from pipeplan.solvers.dp.search.states import Column, SearchStates
from pipeplan.solvers.dp.search.topology import ComponentLayout


@dataclass(frozen=True)
class CandidateStages:
    """Stages to be sized: all pairs (end position, cut I), one column each."""

    numbers: Ints
    behind: Floats
    """The demand of the state behind each stage."""

    target = Column(0)
    """Index of the stage's cut I among the cuts under consideration."""
    level = Column(1)
    """The level that the stage's workers span."""
    state = Column(2)
    """The state in front of which the stage is added."""
    end = Column(3)
    """One past the last worker."""
    next_first = Column(6)
    """The first worker of the next stage."""
    next_level = Column(7)
    """The level that the next stage spans."""

    @staticmethod
    def of(
        stage: StageTerms, states: SearchStates, places: EndPositions, need: Ints, pairs: tuple[Ints, Ints, Ints]
    ) -> CandidateStages:
        """Build the stages from `pairs` (level, target, end position); `need` is the number of workers needed before
        cut I."""
        level, target, position = pairs
        state = places.state[position]
        lowest = np.maximum(need[stage.begin][target], places.lowest[position])
        rows = (
            target,
            level,
            state,
            places.end[position],
            lowest,
            places.room[level, position],
            states.first[state],
            states.level[state],
        )
        return CandidateStages(np.stack(rows), states.demand[state])

    def take(self, rows: Ints | Flags) -> CandidateStages:
        """The selected stages."""
        places = rows.nonzero()[0] if rows.dtype == np.bool_ else rows
        if len(places) == len(self.behind) and rows.dtype == np.bool_:
            return self
        return CandidateStages(self.numbers.take(places, axis=1), self.behind[places])

    def has_room(self, replicas: Floats) -> Flags:
        """Whether the level has room for `replicas` replicas, and enough workers remain in front of them."""
        fits: Flags = replicas <= self.most
        return fits

    @property
    def most(self) -> Ints:
        """The most replicas for which the level has room and enough workers remain in front."""
        most: Ints = np.minimum(self.numbers[5], self.numbers[3] - self.numbers[4])
        return most


SizedStages = tuple[CandidateStages, Floats, Floats, Floats]
"""Stages with their replicas, depths and demands."""


@dataclass(frozen=True)
class EndPositions:
    """End positions of stages: pairs of a state and an end e ≤ p."""

    state: Ints
    end: Ints
    lowest: Ints
    """The lowest first worker of a stage with a fast enough boundary behind it."""
    room: Ints
    """For each level 0 … L (rows): number of workers up to e in the component of that level that contains e - 1."""

    def __len__(self) -> int:
        return len(self.end)

    def take(self, rows: slice) -> EndPositions:
        """The selected positions."""
        return EndPositions(self.state[rows], self.end[rows], self.lowest[rows], self.room[:, rows])


FEW = 40
"""Largest number of further replica counts that are all tried at once."""


class StageSizing:
    """Replica counts and depths for one threshold."""

    def __init__(self, terms: CostTerms, threshold: float, limits: SearchLimits) -> None:
        self.terms, self.limits = terms, limits
        self.layout: ComponentLayout = terms.layout
        self.threshold = threshold
        self.within = threshold * (1 + SLACK)

    @property
    def counts_depths(self) -> bool:
        """Whether the number of minibatches in flight matters: for memory, or because two weight versions must
        suffice."""
        return self.terms.training and (self.limits.memory or self.terms.accumulate is not None)

    def two_versions_suffice(self, demand: Floats, allreduce_s: Floats) -> Flags:
        """Whether two weight versions suffice, under the schedule that keeps two (`formulas.buffered_step_time`)."""
        problem = self.terms.problem
        assert self.terms.accumulate is not None
        spare = self.terms.accumulate - demand
        reduce_s = allreduce_s + problem.copies_allreduce_s
        in_time: Flags = (spare >= 0) & (reduce_s <= self.within * (np.maximum(spare, 0) + 1 / problem.copies))
        return in_time

    def allowed(self, stage: StageTerms) -> ReplicaIntervals:
        """The numbers of replicas that keep stages within the threshold, by level."""
        return self.only(stage.allowed(self.within))

    def only(self, intervals: ReplicaIntervals) -> ReplicaIntervals:
        """The allowed numbers, restricted to the number of the uniform grid if a grid is searched for."""
        shape = self.limits.shape
        return intervals if shape is None else replace(intervals, only=shape.replicas)

    def _fewest(self, stage: StageTerms) -> Floats:
        """The fewest allowed replicas, by level and stage."""
        return self.allowed(stage).least(np.ones((self.layout.top + 1, len(stage))))

    def _wait(self, stage: StageTerms, candidates: CandidateStages, replicas: Floats) -> Floats:
        """Minibatches that pass while replicas wait for their group's all-reduce."""
        return stage.wait(candidates.target, replicas, candidates.level, self.threshold)

    def _replicas_for(self, depth: Floats, cover: Floats) -> Floats:
        """The fewest replicas for which a depth covers the minibatches in flight behind."""
        with np.errstate(divide="ignore", invalid="ignore"):
            count: Floats = np.ceil(cover / np.maximum(depth - 1, 0) - formulas.ROUNDING)
        return count

    def _in_memory(
        self, stage: StageTerms, candidates: CandidateStages, replicas: Floats
    ) -> tuple[CandidateStages, Floats, Floats, Floats]:
        """The replica counts that fit in memory, with one entry for each depth, while the demand may still fall.

        Returns the candidate stages with their replicas, depths and demands.
        """
        replicas, depth, demand = self._size(stage, candidates, replicas, np.full(len(replicas), np.inf))
        finite = np.isfinite(replicas)
        candidates, replicas, depth, demand = candidates.take(finite), replicas[finite], depth[finite], demand[finite]
        parts_found = [(candidates, replicas, depth, demand)]
        # A smaller depth takes more replicas, so it helps only while their product may fall.
        more = depth > 2
        # The number of further replica counts that may lower the demand: r · depth is at least r plus the minibatches
        # that the depth covers.
        extra = np.where(more, np.ceil(demand - candidates.behind - formulas.ROUNDING) - 1 - replicas, 0.0)
        few = more & (extra <= FEW)
        parts_found += self._counted_up(stage, candidates.take(few), replicas[few], demand[few], extra[few])
        many = more & ~few
        parts_found += self._stepped(stage, candidates.take(many), replicas[many], depth[many], demand[many])
        parts, *columns = zip(*parts_found, strict=True)
        joined = CandidateStages(
            np.concatenate([part.numbers for part in parts], axis=1), np.concatenate([part.behind for part in parts])
        )
        count, depth, demand = (np.concatenate(column) for column in columns)
        if self.terms.accumulate is None:
            return joined, count, depth, demand
        enough = self.two_versions_suffice(demand, stage.allreduce(joined.target, count, joined.level))
        return joined.take(enough), count[enough], depth[enough], demand[enough]

    def _counted_up(
        self, stage: StageTerms, candidates: CandidateStages, replicas: Floats, demand: Floats, extra: Floats
    ) -> list[SizedStages]:
        """The replica counts, up to `extra` above the present one, that lower the demand."""
        times = np.maximum(extra, 0).astype(np.intp)
        rows = np.repeat(np.arange(len(times)), times)
        if not len(rows):
            return []
        step = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times) + 1
        count = replicas[rows] + step
        fits = np.flatnonzero(count <= candidates.most[rows])
        rows, count = rows[fits], count[fits]
        selected = candidates.take(rows)
        wait = self._wait(stage, selected, count)
        depth = _deepened(count, self._cover(stage, selected, count, wait))
        lower = formulas.in_flight_behind(depth, count, wait)
        useful = (lower < demand[rows]) & (depth <= stage.max_depth_of(selected.target, count))
        useful[useful] = (
            self.allowed(stage).least(count[useful], (selected.level[useful], selected.target[useful])) == count[useful]
        )
        return [(selected.take(useful), count[useful], depth[useful], lower[useful])]

    def _stepped(
        self, stage: StageTerms, candidates: CandidateStages, replicas: Floats, depth: Floats, demand: Floats
    ) -> list[SizedStages]:
        """The fewest replicas for each smaller depth, if they may lower the demand."""
        times = np.maximum(depth - 2, 0).astype(np.intp)
        rows = np.repeat(np.arange(len(times)), times)
        if not len(rows):
            return []
        smaller: Floats = (np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times) + 2).astype(float)
        behind = candidates.behind[rows]
        least = np.maximum(self._replicas_for(smaller, behind), replicas[rows] + 1)
        useful = np.flatnonzero(least + behind < demand[rows])
        useful = useful[least[useful] <= candidates.most[rows[useful]]]
        rows, selected = rows[useful], candidates.take(rows[useful])
        count, reached, lower = self._size(stage, selected, least[useful], smaller[useful])
        lowering = np.isfinite(count) & (lower < demand[rows])
        return [(selected.take(lowering), count[lowering], reached[lowering], lower[lowering])]

    def _size(
        self, stage: StageTerms, candidates: CandidateStages, replicas: Floats, deepest: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """The fewest replicas, from `replicas` on, for which a depth of `deepest` suffices; infinite if none does.

        Returns replicas, depths and demands. The minibatches to cover grow with the replicas, because the all-reduce
        takes longer and the boundary may span a higher level. So iterating from below reaches the smallest solution.
        """
        count, depth, demand = replicas.copy(), np.ones(len(replicas)), np.zeros(len(replicas))
        open_rows = np.arange(len(replicas))
        while len(open_rows):
            selected = candidates if len(open_rows) == len(replicas) else candidates.take(open_rows)
            fewest = self.allowed(stage).least(count[open_rows], (selected.level, selected.target))
            count[open_rows] = np.where(selected.has_room(fewest), fewest, np.inf)
            fits = np.isfinite(count[open_rows])
            open_rows, selected, fewest = open_rows[fits], selected.take(fits), fewest[fits]
            wait = self._wait(stage, selected, fewest)
            cover = self._cover(stage, selected, fewest, wait)
            covering = np.where(stage.lasts[selected.target], 1.0, _deepened(fewest, cover))
            depth[open_rows], demand[open_rows] = covering, formulas.in_flight_behind(covering, fewest, wait)
            most = np.minimum(deepest[open_rows], stage.max_depth_of(selected.target, fewest))
            late = np.flatnonzero(covering > most)
            open_rows = open_rows[late]
            if stage.problem.divided_ratio or self.terms.first is not None:
                # With more replicas, more minibatches fit in memory, or fewer versions are kept.
                most = stage.deepest(replicated=True)[selected.target]
                more = np.where(most[late] > 1, self._replicas_for(most[late], cover[late]), 0.0)
                more = np.maximum(more, stage.replicas_for_versions(selected.target[late], fewest[late], cover[late]))
            else:
                more = np.where(most[late] >= 1, self._replicas_for(most[late], cover[late]), np.inf)
            count[open_rows] = np.maximum(more, fewest[late] + 1)
        return count, depth, demand

    def _cover(self, stage: StageTerms, candidates: CandidateStages, replicas: Floats, wait: Floats) -> Floats:
        """The minibatches that a stage's depth must cover in addition to one for each replica
        (`formulas.in_flight_depth`).

        The transfer is at the level of the smallest component that contains both stages.
        """
        transfer_s = self.terms.transfer_s[stage.ends[candidates.target], self.joined(candidates, replicas)]
        return np.asarray(candidates.behind + wait + 2 * transfer_s / self.threshold)

    def joined(self, candidates: CandidateStages, replicas: Floats) -> Ints:
        """The level of the smallest component that contains a stage and the stage behind it."""
        start = (candidates.end - replicas).astype(np.intp)
        return np.maximum(self.layout.between(start, candidates.next_first), candidates.next_level)


def _deepened(replicas: Floats, cover: Floats) -> Floats:
    """The depth that covers the minibatches in flight behind."""
    return np.asarray(1 + np.ceil(cover / replicas - formulas.ROUNDING))
