"""The searches with the loads of shared resources charged to every stage, in the steady state and for batches.

Both are the searches over candidate placements with the states and the dominance of `charging_search`. In the steady
state a stage on a placement begins at one of a window of cuts, so only those are sized.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan.schedules import VERTICAL
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK, SearchLimits, Step
from pipeplan.solvers.dp.charged.charging_search import AT_ONCE, ChargingSearch, SharedLimit
from pipeplan.solvers.dp.flush.heterogeneous_flush import HeterogeneousFlushSearch
from pipeplan.solvers.dp.steady import vertical_sync
from pipeplan.solvers.dp.terms.cost_terms import CostTerms
from pipeplan.solvers.dp.terms.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.terms.stage_terms import StageTerms


class ChargedSearch(ChargingSearch):
    """The search for a pipeline within one threshold, in the steady state."""

    def __init__(self, terms: HeterogeneousTerms, threshold: float, limits: SearchLimits, shared: SharedLimit) -> None:
        super().__init__(terms, threshold, limits)
        self.shared = shared

    def _useful(self, stages: list[StageTerms], kinds: tuple[Floats, Ints, Floats]) -> Flags:
        return np.asarray(np.logical_or.reduce([self._windows(stage, *kinds)[2] > 0 for stage in stages]))

    def _stages(
        self, stage: StageTerms, kinds: tuple[Floats, Ints, Floats], kind: Ints
    ) -> Iterator[tuple[Ints, Ints, Floats, Floats]]:
        behind, runs, transfer = kinds
        order, begins, counts = self._windows(stage, *kinds)
        pairs = _Groups.of(kind, len(runs))
        chunks = np.flatnonzero(np.diff(np.cumsum(counts) // AT_ONCE, prepend=-1, append=-1)).tolist()
        for begin, stop in itertools.pairwise(chunks):
            self.limits.step(int(counts[begin:stop].sum()))
            which, place = _ranges(begins[begin:stop], counts[begin:stop])
            row, one = order[place], begin + which
            depth, demand = self._sized(stage.take(row), behind[one], runs[one], transfer[one], pairs=True)
            fits = np.flatnonzero(np.isfinite(demand))
            element, pair = pairs.members(one[fits])
            element = fits[element]
            sort = np.lexsort((pair, row[element]))
            element, pair = element[sort], pair[sort]
            yield row[element], pair, depth[element], demand[element]

    def _windows(self, stage: StageTerms, behind: Floats, runs: Ints, transfer: Floats) -> tuple[Ints, Ints, Ints]:
        """The cuts at which a stage on each placement may begin: an order of all, and begins and lengths in it.

        A stage has no more work than its replicas can do, memory for what it covers without waits for all-reduces, and
        enough workers in front of it.
        """
        table, work_s = self.terms.runs, self.terms.cuts.work_s
        order = np.argsort(work_s[stage.targets], kind="stable")
        sizes, lowest = work_s[stage.targets][order], np.maximum.accumulate(self.lowest[stage.targets][order])
        most = table.replicas[runs] * table.speed[runs] * self.within * (1 + SLACK)
        begins = np.searchsorted(sizes, work_s[stage.cut] * (1 - SLACK) - most)
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


@dataclass(frozen=True)
class _Groups:
    """Elements, by their number, grouped by kind."""

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
        """All elements of some kinds: the index of the kind in the list, and the element."""
        which, place = _ranges(self.begins[kinds], self.counts[kinds])
        return which, self.order[place]


def _ranges(begins: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """The members of ranges of whole numbers: the index of the range of each, and the number."""
    which = np.repeat(np.arange(len(begins)), counts)
    before = np.cumsum(counts) - counts
    return which, np.arange(len(which)) - before[which] + begins[which]


class ChargedFlushSearch(ChargingSearch, HeterogeneousFlushSearch):
    """The search for the fastest batch within a limit."""

    def __init__(self, terms: HeterogeneousTerms, limit_s: float, limits: SearchLimits, shared: SharedLimit) -> None:
        super().__init__(terms, limit_s, limits)
        self.shared = shared


def find_charged_pipeline(
    terms: HeterogeneousTerms, limit: float, limits: SearchLimits, shared: SharedLimit
) -> list[Step] | None:
    """A pipeline with every resource, or its batch, within the limit, and every shared one within its own, or None."""
    if terms.problem.options.flushes:
        return ChargedFlushSearch(terms, limit, limits, shared).run()

    def once(assumed: CostTerms) -> list[Step] | None:
        assert isinstance(assumed, HeterogeneousTerms)
        return ChargedSearch(assumed, limit, limits, shared).run()

    if terms.training and terms.schedule == VERTICAL and limits.memory:
        return vertical_sync.find_vertical_sync_pipeline(terms, limit, limits, once)
    return once(terms)
