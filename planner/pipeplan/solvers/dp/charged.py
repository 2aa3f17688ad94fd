"""Finds the fastest plan with contention charged, starting from the bounds that a search without contention has proven.

A search over candidate placements (`placement_search`) decides whether any plan stays within a step time, including the
load of shared cards, ports and cores. Bisection between the bound without contention and the step time of the best
known plan finds the fastest plan and proves it.

If there are too many placements for that search, the best of a few plans is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipeplan.cost import contention
from pipeplan.plan.plan import Plan
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import threshold
from pipeplan.solvers.dp.budget import OutOfTime, SearchLimits, StateCounts
from pipeplan.solvers.dp.find_pipeline import find_pipeline, pipeline_step_time
from pipeplan.solvers.dp.grids import shape_floors
from pipeplan.solvers.dp.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.results import BestSoFar, Region, SearchTask, alone_result, found_result, plan_of
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.placement_search import SharedLimit
from pipeplan.solvers.dp.search.shared_resources import SharedResources
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.passed_components import PassedLevel, passed_levels, without_straddling
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces
from pipeplan.solvers.result import Result, Status

MOST_WORKERS, MOST_PLACEMENTS = 1024, 256**2
"""Limits for searching all candidate placements with contention: the number of workers, and its product with the
largest number of replicas of a stage."""

# Up to this number of cuts times workers, the plan with the fewest stages and workers among the best is returned.
_SMALL_SEARCH = 20_000
# Larger searches take seconds. So the first is at this relative distance above the bound, where it often finds a plan.
_FIRST_STEP = 5e-3


def charges(problem: Problem) -> bool:
    """Whether plans of a problem can be searched for with contention charged."""
    workers = problem.cluster.workers
    few = workers <= MOST_WORKERS and workers * problem.most_replicas <= MOST_PLACEMENTS
    return problem.options.contention and few


@dataclass(frozen=True)
class ChargedPipeline:
    """A pipeline of a region, and its step time with contention, in seconds per minibatch of the whole plan."""

    step_time_s: float
    region: Region
    pipeline: FoundPipeline


@dataclass
class ChargedPipelines:
    """The search for the fastest pipeline of some regions with contention charged."""

    task: SearchTask
    memory_binds: bool = False
    """Whether the memory limit makes the fastest pipeline without contention slower."""
    _known: dict[tuple[PlanSpace, bool], SharedResources] = field(default_factory=dict)

    def charge(self, region: Region, pipeline: FoundPipeline, step_time_s: float) -> ChargedPipeline:
        """A pipeline with its step time including contention; `step_time_s` is its step time without contention."""
        resources = self._resources(region, memory=False)
        steps = pipeline.steps_among(self.task.cuts)
        return ChargedPipeline(
            max(step_time_s, resources.busiest_s(steps)), region, FoundPipeline(resources.terms, steps)
        )

    def best(self, regions: list[Region], known: ChargedPipeline) -> BisectionResult[ChargedPipeline]:
        """The fastest pipeline of these regions, at most as slow as the `known` pipeline, with the bound reached."""
        regions = [
            replace(region, low_s=max(region.low_s, self._resources(region, memory=False).floor_s))
            for region in regions
            if region.low_s < known.step_time_s
        ]
        low = min([known.step_time_s, *(region.low_s for region in regions)])
        if low >= min(self.task.useful_s, known.step_time_s):
            return BisectionResult(low, known.step_time_s, known)
        if self.memory_binds:
            # A pipeline that is found without the memory limit would not fit.
            return self._bisect(regions, known, memory=True)
        result = self._bisect(regions, known, memory=False)
        assert result.best is not None
        if not self.task.problem.options.memory or self._fits(result.best):
            return result
        if not result.finished:
            return replace(result, high=known.step_time_s, best=known)
        return self._bisect([replace(one, low_s=max(one.low_s, result.low)) for one in regions], known, memory=True)

    def _resources(self, region: Region, *, memory: bool) -> SharedResources:
        """The shared resources of a region, with their cost terms."""
        key = region.space, memory
        if key not in self._known:
            self._known[key] = SharedResources.of(self.task.problem, region.space, self.task.cuts, memory=memory)
        return self._known[key]

    def _fits(self, found: ChargedPipeline) -> bool:
        """Whether a pipeline fits in memory at the depths that its step time needs."""
        inner_s = found.region.space.inner_step_time(self.task.problem, found.step_time_s)
        assert inner_s is not None
        return found.pipeline.fits(self._resources(found.region, memory=True).terms, inner_s)

    def _bisect(
        self, regions: list[Region], known: ChargedPipeline, *, memory: bool
    ) -> BisectionResult[ChargedPipeline]:
        low = min(region.low_s for region in regions)

        def find(step_time_s: float) -> tuple[float, ChargedPipeline] | None:
            for region in regions:
                if (
                    region.low_s <= step_time_s
                    and (found := self._find(region, step_time_s, memory=memory)) is not None
                ):
                    return found.step_time_s, found
            return None

        start = known.step_time_s, known
        if low < self.task.useful_s < known.step_time_s:
            # Pipelines slower than `useful_s` are useless, so search below it first.
            near = threshold.least_near(find, low, self.task.useful_s, gap=self.task.gap)
            if near.best is None:
                return replace(near, high=known.step_time_s, best=known)
            if near.closed or not near.finished:
                if near.finished:
                    near.best = self._smallest(near.best, memory=memory)
                return near
            low, start = near.low, (near.high, near.best)
        # A plan that was found without the memory limit only gives a bound.
        counts = memory or not self.task.problem.options.memory
        result = threshold.least_threshold(
            find,
            low * (1 - PRECISION),
            known.step_time_s,
            start,
            gap=self.task.gap,
            useful=self.task.useful_s,
            report=lambda least, best: self.task.report(least, best if counts else known.step_time_s),
            first_step=threshold.PRECISION if self._is_small or self.task.problem.options.flushes else _FIRST_STEP,
        )
        if result.finished and result.best is not None:
            result.best = self._smallest(result.best, memory=memory)
        return result

    def _find(
        self, region: Region, step_time_s: float, *, memory: bool, counting: StateCounts | None = None
    ) -> ChargedPipeline | None:
        """A pipeline of a region with at most this step time, or None. Raises `OutOfTime`."""
        inner_s = region.space.inner_step_time(self.task.problem, step_time_s)
        resources = self._resources(region, memory=memory)
        terms = resources.terms
        if inner_s is None or terms.most_replicas < 1:
            return None
        for limits in self._limits(region, terms, memory=memory):
            chosen = limits if counting is None else replace(limits, counting=counting)
            steps = find_pipeline(terms, inner_s, chosen, SharedLimit(resources, step_time_s))
            if steps is not None:
                depths = limits.memory or terms.accumulate is not None
                alone = region.space.step_time(self.task.problem, pipeline_step_time(terms, steps, depths=depths))
                step_time = max(alone, resources.busiest_s(steps))
                return ChargedPipeline(step_time, region, FoundPipeline(terms, steps))
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
        """The pipeline with the fewest stages, and then workers, among equally fast pipelines in the region of `best`.

        If finding another one would take long, `best` itself is returned.
        """
        if not self._is_small or self.task.problem.options.grid:
            return best
        exact = self.task.problem.options.stages is not None or bool(self.task.problem.options.pins)
        counting = StateCounts(stages=True, exact_stages=exact, workers=True)
        try:
            found = self._find(best.region, best.step_time_s * (1 + 1e-10), memory=memory, counting=counting)
        except (OutOfTime, KeyboardInterrupt):
            return best
        return best if found is None else replace(found, step_time_s=best.step_time_s)


def charged_result(task: SearchTask, alone: BestSoFar) -> Result:
    """The result of a task with contention charged; `alone` has the bounds and the best plan without contention."""
    note = f"what workers share is charged exactly where a stage has at most {MOST_PLACEMENTS:,} places"
    exact = charges(task.problem)
    if task.price is None and not exact:
        return replace(alone_result(task, alone), note=note)
    levels = passed_levels(task.problem, task.cuts)
    if alone.finished and alone.regions:
        least_s = max((one.bound_s for one in levels), default=0.0)
        raised = [replace(one, low_s=max(one.low_s, least_s * (one.space.copies == 1))) for one in alone.regions]
        alone = replace(alone, regions=raised, bound=max(alone.bound, min(one.low_s for one in raised)))
    if exact:
        result = _searched(task, alone)
    else:
        assert task.price is not None
        result = _best_of_few(task, alone, levels, task.price)
        result = replace(result, note="" if result.status == Status.OPTIMAL else note)
    return replace(result, charged=True)


def _searched(task: SearchTask, alone: BestSoFar) -> Result:
    """The result of a search that starts from the bounds without contention."""
    assert alone.best is not None
    problem, (step_time, space, pipeline) = task.problem, alone.best
    bound = max(alone.bound, contention.least_step_time_of_shared_cores_s(problem))
    searches = ChargedPipelines(task, alone.memory_binds)
    known = searches.charge(Region(space, None, bound), pipeline, step_time)
    interval = BisectionResult(bound, known.step_time_s, known, alone.finished, alone.interrupted, task.gap)
    if alone.finished and not interval.closed:
        regions = alone.regions
        if problem.options.grid:
            regions = [Region(space, shape, low) for shape, low in shape_floors(problem, task.cuts)]
        try:
            interval = searches.best([replace(one, low_s=max(one.low_s, bound)) for one in regions], known)
        except KeyboardInterrupt:
            interval = replace(interval, finished=False, interrupted=True)
    assert interval.best is not None
    best = interval.best
    plan = plan_of(problem, best.region.space, best.pipeline.stages(), best.step_time_s)
    ends = BisectionResult(interval.low, interval.high, plan, interval.finished, interval.interrupted)
    return found_result(task, ends)


def _best_of_few(
    task: SearchTask, alone: BestSoFar, levels: list[PassedLevel], price: Callable[[Plan], float]
) -> Result:
    """The best of a few plans with contention charged: the best plan without contention, and plans without straddling
    stages."""
    assert alone.best is not None
    problem, (step_time_s, space, pipeline) = task.problem, alone.best
    plans = [plan_of(problem, space, pipeline.stages(), step_time_s)]
    finished, interrupted = alone.finished, alone.interrupted
    single = plan_spaces(problem)[0]
    searches_levels = single.copies == 1 and not problem.options.grid
    for one in levels if searches_levels else []:
        if interrupted or one.bound_s <= step_time_s:
            continue
        kept = without_straddling(problem, one.level)
        inner = PipelineSearches(kept, task.cuts, task.deadline, task.gap, above=one.crossing_s, effort=task.effort)
        found = inner.best()
        interrupted = interrupted or found.interrupted
        if found.best is not None:
            plans.append(plan_of(problem, single, found.best.stages(), max(found.high, one.crossing_s)))
    step_times = [price(plan) for plan in plans]
    best_s = min(step_times)
    best = plans[step_times.index(best_s)]
    return found_result(task, BisectionResult(min(alone.bound, best_s), best_s, best, finished, interrupted))
