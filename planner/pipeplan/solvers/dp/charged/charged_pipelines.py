"""Finds the fastest plan with everything charged, from the bounds that a search without shared resources has proven.

A search over candidate placements (`placement_search`) decides whether any plan keeps within a pace, its shared cards,
ports and cores included. Bisection between the bound without them and the pace of the best plan known so far finds the
fastest plan and proves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import threshold
from pipeplan.solvers.dp.budget import OutOfTime, SearchLimits, StateCounts
from pipeplan.solvers.dp.charged.shared_resources import SharedResources
from pipeplan.solvers.dp.pipelines.choose_search import find_pipeline, pipeline_pace
from pipeplan.solvers.dp.pipelines.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.spaces.best_so_far import Region
from pipeplan.solvers.dp.spaces.search_task import SearchTask
from pipeplan.solvers.dp.steady.placement_search import SharedLimit
from pipeplan.solvers.dp.terms.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.plan_space import PlanSpace

MOST_WORKERS, MOST_PLACEMENTS = 1024, 256**2
"""The most workers, and the most of them times the replicas that a stage may have, for which all candidate placements
are searched with everything charged."""

# Up to this number of cuts times workers, the plan with the fewest stages and workers among the best is returned.
_SMALL_SEARCH = 20_000
# Above, a search takes seconds, and the first one is so far above the bound that it often finds a plan.
_FIRST_STEP = 5e-3


def charges(problem: Problem) -> bool:
    """Whether plans of a problem can be searched for with everything charged."""
    workers = problem.cluster.workers
    few = workers <= MOST_WORKERS and workers * problem.most_replicas <= MOST_PLACEMENTS
    return problem.options.contention and few


@dataclass(frozen=True)
class ChargedPipeline:
    """A pipeline of a region, and its pace with everything charged, in seconds per minibatch of the whole plan."""

    pace_s: float
    region: Region
    pipeline: FoundPipeline


@dataclass
class ChargedPipelines:
    """The search for the fastest pipeline of some regions with everything charged."""

    task: SearchTask
    """What is searched for. With `near` the known pipeline is probably the fastest."""
    memory_binds: bool = False
    """Whether the memory limit makes the fastest pipeline slower where nothing is shared."""
    _known: dict[tuple[PlanSpace, bool], SharedResources] = field(default_factory=dict)

    def charge(self, region: Region, pipeline: FoundPipeline, pace_s: float) -> ChargedPipeline:
        """A pipeline whose pace without shared resources is known, with its pace with everything charged."""
        resources = self._resources(region, memory=False)
        steps = pipeline.steps_among(self.task.cuts)
        return ChargedPipeline(max(pace_s, resources.busiest_s(steps)), region, FoundPipeline(resources.terms, steps))

    def best(self, regions: list[Region], known: ChargedPipeline) -> BisectionResult[ChargedPipeline]:
        """The fastest pipeline of these regions, at most as slow as the `known` one, with the bound reached."""
        regions = [self._with_floor(region) for region in regions if region.low_s < known.pace_s]
        low = min([known.pace_s, *(region.low_s for region in regions)])
        if low >= min(self.task.useful_s, known.pace_s):
            return BisectionResult(low, known.pace_s, known)
        if self.memory_binds:
            # A pipeline that is found without the limit would not fit.
            return self._bisect(regions, known, memory=True)
        result = self._bisect(regions, known, memory=False)
        assert result.best is not None
        if not self.task.problem.options.memory or self._fits(result.best):
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
            self._known[key] = SharedResources.of(self.task.problem, region.space, self.task.cuts, memory=memory)
        return self._known[key]

    def _fits(self, found: ChargedPipeline) -> bool:
        """Whether a pipeline fits in memory at the depths that its pace needs."""
        inner_s = found.region.space.inner_pace(self.task.problem, found.pace_s)
        assert inner_s is not None
        return found.pipeline.fits(self._resources(found.region, memory=True).terms, inner_s)

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
        limit = min(self.task.useful_s, known.pace_s * (1 - PRECISION) if self.task.near else float("inf"))
        if low < limit < known.pace_s:
            # Whatever is slower is of no use, or probably there is nothing faster, so that is asked first.
            near = threshold.least_near(find, low, limit, gap=self.task.gap)
            if near.best is None:
                useful = near.finished and known.pace_s < self.task.useful_s
                best = self._smallest(known, memory=memory) if useful else known
                return replace(near, high=known.pace_s, best=best)
            if near.closed or not near.finished:
                if near.finished:
                    near.best = self._smallest(near.best, memory=memory)
                return near
            low, start = near.low, (near.high, near.best)
        # A plan that was found without the memory limit is only a bound.
        counts = memory or not self.task.problem.options.memory
        result = threshold.least_threshold(
            find,
            low * (1 - PRECISION),
            known.pace_s,
            start,
            gap=self.task.gap,
            useful=self.task.useful_s,
            report=lambda least, best: self.task.report(least, best if counts else known.pace_s),
            first_step=threshold.PRECISION if self._is_small or self.task.problem.options.flushes else _FIRST_STEP,
        )
        if result.finished and result.best is not None:
            result.best = self._smallest(result.best, memory=memory)
        return result

    def _find(
        self, region: Region, pace_s: float, *, memory: bool, counting: StateCounts | None = None
    ) -> ChargedPipeline | None:
        """A pipeline of a region with at most this pace, or None. Raises `OutOfTime`."""
        inner_s = region.space.inner_pace(self.task.problem, pace_s)
        resources = self._resources(region, memory=memory)
        terms = resources.terms
        if inner_s is None or terms.most_replicas < 1:
            return None
        for limits in self._limits(region, terms, memory=memory):
            chosen = limits if counting is None else replace(limits, counting=counting)
            steps = find_pipeline(terms, inner_s, chosen, SharedLimit(resources, pace_s))
            if steps is not None:
                depths = limits.memory or terms.accumulate is not None
                alone = region.space.pace(self.task.problem, pipeline_pace(terms, steps, depths=depths))
                pace = max(alone, resources.busiest_s(steps))
                return ChargedPipeline(pace, region, FoundPipeline(terms, steps))
        return None

    def _limits(self, region: Region, terms: HeterogeneousTerms, *, memory: bool) -> list[SearchLimits]:
        """The limits of the searches of a region: one, or one for each number of stages."""
        task = self.task
        searches = PipelineSearches(terms.problem, task.cuts, task.deadline, task.gap, region.shape, effort=task.effort)
        limits = searches.limits(memory=memory)
        return [replace(limits, exact_stages=count) for count in searches.stage_counts(terms, limits)]

    @property
    def _is_small(self) -> bool:
        return len(self.task.cuts.ideals) * self.task.problem.cluster.workers <= _SMALL_SEARCH

    def _smallest(self, best: ChargedPipeline, *, memory: bool) -> ChargedPipeline:
        """The pipeline with the fewest stages, and then workers, among the equally fast ones of the best one's region.

        The best one itself is returned where finding another would take long.
        """
        if not self._is_small or self.task.problem.options.grid:
            return best
        exact = self.task.problem.options.stages is not None or bool(self.task.problem.options.pins)
        counting = StateCounts(stages=True, exact_stages=exact, workers=True)
        try:
            found = self._find(best.region, best.pace_s * (1 + 1e-10), memory=memory, counting=counting)
        except (OutOfTime, KeyboardInterrupt):
            return best
        return best if found is None else replace(found, pace_s=best.pace_s)
