"""Finds the fastest plan with everything charged, from the bounds that a search without shared resources has proven.

A search over candidate placements (`charged_search`) decides whether any plan keeps within a pace, its shared cards,
ports and cores included. Bisection between the bound without them and the pace of the best plan known so far finds the
fastest plan and proves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipeplan.problem.cuts import Cuts
from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import flush_search, threshold
from pipeplan.solvers.dp.budget import OutOfTime, SearchEffort, SearchLimits, StateCounts
from pipeplan.solvers.dp.charged_search import ChargedBatchObjective, SharedLimit, find_charged_pipeline
from pipeplan.solvers.dp.heterogeneous_plans import heterogeneous_pace
from pipeplan.solvers.dp.heterogeneous_search import HeterogeneousTerms
from pipeplan.solvers.dp.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.shared_resources import SharedResources
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.plan_space import PlanSpace

MOST_WORKERS = 256
"""The most workers for which all candidate placements are searched with everything charged."""

# Up to this number of cuts times workers, the plan with the fewest stages and workers among the best is returned.
_SMALL_SEARCH = 20_000


@dataclass(frozen=True)
class Region:
    """A part of the searched space: one space of plans, or one shape of a uniform grid."""

    space: PlanSpace
    shape: GridShape | None
    low_s: float
    """No plan of the region has a smaller pace, in seconds per minibatch."""


@dataclass(frozen=True)
class ChargedPipeline:
    """A pipeline of a region, and its pace with everything charged, in seconds per minibatch of the whole plan."""

    pace_s: float
    region: Region
    pipeline: FoundPipeline


@dataclass
class ChargedPipelines:
    """The search for the fastest pipeline of some regions with everything charged."""

    problem: Problem
    cuts: Cuts
    deadline: float | None = None
    gap: float = 0.0
    effort: SearchEffort = field(default_factory=SearchEffort)
    useful_s: float = float("inf")
    """Plans with at least this pace are of no use: the search may end when it knows that all others are slower."""
    report: Callable[[float, float], None] = lambda bound, best: None
    """Is called with the bound and the pace of the best plan, in seconds per minibatch, as they change."""
    _known: dict[tuple[PlanSpace, bool], SharedResources] = field(default_factory=dict)

    def charge(self, region: Region, pipeline: FoundPipeline, pace_s: float) -> ChargedPipeline:
        """A pipeline whose pace without shared resources is known, with its pace with everything charged."""
        resources = self._resources(region, memory=False)
        steps = pipeline.steps_among(self.cuts)
        return ChargedPipeline(max(pace_s, resources.busiest_s(steps)), region, FoundPipeline(resources.terms, steps))

    def best(self, regions: list[Region], known: ChargedPipeline) -> BisectionResult[ChargedPipeline]:
        """The fastest pipeline of these regions, at most as slow as the `known` one, with the bound reached."""
        regions = [self._with_floor(region) for region in regions if region.low_s < known.pace_s]
        low = min([known.pace_s, *(region.low_s for region in regions)])
        if low >= min(self.useful_s, known.pace_s):
            return BisectionResult(low, known.pace_s, known)
        if self.problem.options.flushes:
            return self._best_batch(regions, known)
        result = self._bisect(regions, known, memory=False)
        assert result.best is not None
        if not self.problem.options.memory or self._fits(result.best):
            return result
        if not result.finished:
            return replace(result, high=known.pace_s, best=known)
        return self._bisect([replace(one, low_s=max(one.low_s, result.low)) for one in regions], known, memory=True)

    def _with_floor(self, region: Region) -> Region:
        return replace(region, low_s=max(region.low_s, self._resources(region, memory=False).floor_s))

    def _resources(self, region: Region, *, memory: bool) -> SharedResources:
        """The shared resources of a region, with their terms."""
        key = region.space, memory
        if key not in self._known:
            self._known[key] = SharedResources.of(self.problem, region.space, self.cuts, memory=memory)
        return self._known[key]

    def _fits(self, found: ChargedPipeline) -> bool:
        """Whether a pipeline fits in memory at the depths that its pace needs."""
        inner_s = found.region.space.inner_pace(self.problem, found.pace_s)
        assert inner_s is not None
        return found.pipeline.fits(self._resources(found.region, memory=True).terms, inner_s)

    # -- the steady state --

    def _bisect(
        self, regions: list[Region], known: ChargedPipeline, *, memory: bool
    ) -> BisectionResult[ChargedPipeline]:
        low = min(region.low_s for region in regions)

        def find(pace_s: float) -> tuple[float, ChargedPipeline] | None:
            for region in regions:
                if region.low_s <= pace_s and (found := self._find(region, pace_s, memory=memory)) is not None:
                    return found.pace_s, found
            return None

        start = known.pace_s, known
        # A plan that was found without the memory limit is only a bound.
        counts = memory or not self.problem.options.memory
        result = threshold.least_threshold(
            find,
            low * (1 - PRECISION),
            known.pace_s,
            start,
            gap=self.gap,
            report=lambda least, best: self.report(least, best if counts else known.pace_s),
        )
        if result.finished and result.best is not None:
            result.best = self._smallest(result.best, memory=memory)
        return result

    def _find(
        self, region: Region, pace_s: float, *, memory: bool, counting: StateCounts | None = None
    ) -> ChargedPipeline | None:
        """A pipeline of a region with at most this pace, or None. Raises `OutOfTime`."""
        inner_s = region.space.inner_pace(self.problem, pace_s)
        resources = self._resources(region, memory=memory)
        terms = resources.terms
        if inner_s is None or terms.most_replicas < 1:
            return None
        for limits in self._limits(region, terms, memory=memory):
            chosen = limits if counting is None else replace(limits, counting=counting)
            steps = find_charged_pipeline(terms, inner_s, chosen, SharedLimit(resources, pace_s))
            if steps is not None:
                depths = limits.memory or terms.accumulate is not None
                alone = region.space.pace(self.problem, heterogeneous_pace(terms, steps, depths=depths))
                pace = max(alone, resources.busiest_s(steps))
                return ChargedPipeline(pace, region, FoundPipeline(terms, steps))
        return None

    def _limits(self, region: Region, terms: HeterogeneousTerms, *, memory: bool) -> list[SearchLimits]:
        """The limits of the searches of a region: one, or one for each number of stages."""
        searches = PipelineSearches(terms.problem, self.cuts, self.deadline, self.gap, region.shape, effort=self.effort)
        limits = searches.limits(memory=memory)
        return [replace(limits, exact_stages=count) for count in searches.stage_counts(terms, limits)]

    def _smallest(self, best: ChargedPipeline, *, memory: bool) -> ChargedPipeline:
        """The pipeline with the fewest stages, and then workers, among the equally fast ones of the best one's region.

        The best one itself is returned where finding another would take long.
        """
        if len(self.cuts.ideals) * self.problem.cluster.workers > _SMALL_SEARCH or self.problem.options.grid:
            return best
        exact = self.problem.options.stages is not None or bool(self.problem.options.pins)
        counting = StateCounts(stages=True, exact_stages=exact, workers=True)
        try:
            found = self._find(best.region, best.pace_s * (1 + 1e-10), memory=memory, counting=counting)
        except (OutOfTime, KeyboardInterrupt):
            return best
        return best if found is None else replace(found, pace_s=best.pace_s)

    # -- flush schedules --

    def _best_batch(self, regions: list[Region], known: ChargedPipeline) -> BisectionResult[ChargedPipeline]:
        result = BisectionResult[ChargedPipeline](known.pace_s, known.pace_s, known)
        lows: list[float] = []
        try:
            for region in regions:
                if region.low_s < result.high * (1 - PRECISION):
                    low, result.best = self._best_of_region(region, result.best or known)
                    result.high = result.best.pace_s
                    lows.append(low)
        except OutOfTime:
            result.finished = False
        except KeyboardInterrupt:
            result.finished, result.interrupted = False, True
        if not result.finished:
            lows += [region.low_s for region in regions]
        result.low = min([result.high, *lows])
        return result

    def _best_of_region(self, region: Region, best: ChargedPipeline) -> tuple[float, ChargedPipeline]:
        """The bound of a region, and the best pipeline so far. Raises `OutOfTime`.

        Each search asks for any plan whose batch and shared resources keep within a limit, which is told much sooner
        than the fastest such plan. Every other limit is just below the best plan, which ends the search where that
        cannot be beaten; those in between halve what is left.
        """
        low, proves = region.low_s, True
        while low < min(best.pace_s * (1 - 2 * PRECISION), self.useful_s):
            limit = min(best.pace_s * (1 - PRECISION), self.useful_s)
            if not proves and limit > low * (1 + 3e-4):
                limit = (low * limit) ** 0.5 if low > 0 else limit / 2
            bound, found = self._any_batch(region, limit)
            if found is not None and found.pace_s < best.pace_s:
                best = found
            low, proves = max(low, min(bound, limit)), not proves
        return min(low, best.pace_s), best

    def _any_batch(self, region: Region, limit_s: float) -> tuple[float, ChargedPipeline | None]:
        """A plan whose batch and shared resources take at most `limit_s` per minibatch, if there is one.

        The first value bounds the pace of plans that keep within the limit; it is the limit where there is none.
        """
        memory, count = self.problem.options.memory, self.problem.options.accumulate
        assert count is not None
        resources = self._resources(region, memory=memory)
        terms = resources.terms
        best, bound = None, float("inf")
        for limits in self._limits(region, terms, memory=memory):
            batches = ChargedBatchObjective(terms, limits, SharedLimit(resources, limit_s))
            answer = flush_search.fastest_batch(batches, 0.0, limit_s * count, gap=1.0, perhaps_none=True)
            if answer.interrupted:
                raise KeyboardInterrupt
            if not answer.finished:
                raise OutOfTime
            bound = min(bound, answer.bound_s / count)
            if answer.steps is not None:
                pace = max(answer.total_s / count, resources.busiest_s(answer.steps))
                if best is None or pace < best.pace_s:
                    best = ChargedPipeline(pace, region, FoundPipeline(terms, answer.steps))
        return bound, best
