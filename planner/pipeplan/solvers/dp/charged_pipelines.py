"""Finds the fastest plan with everything charged, from the bounds that a search without shared resources has proven.

A search over candidate placements (`charged_search`) decides whether any plan keeps within a pace, its shared cards,
ports and cores included. Bisection between the bound without them and the pace of the best plan known so far finds the
fastest plan and proves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import flush_search, threshold
from pipeplan.solvers.dp.budget import OutOfTime, SearchEffort
from pipeplan.solvers.dp.charged_search import ChargedBatchObjective, SharedLimit, find_charged_pipeline
from pipeplan.solvers.dp.heterogeneous_search import HeterogeneousTerms
from pipeplan.solvers.dp.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.shared_resources import SharedResources
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.plan_space import PlanSpace

MOST_WORKERS = 256
"""The most workers for which all candidate placements are searched with everything charged."""
_HALVINGS = 50


@dataclass(frozen=True)
class ScoredPlan:
    """A plan with its depths, and its pace by the evaluator, in seconds per minibatch."""

    pace_s: float
    plan: Plan


@dataclass(frozen=True)
class Region:
    """A part of the searched space: one space of plans, or one shape of a uniform grid."""

    space: PlanSpace
    shape: GridShape | None
    low_s: float
    """No plan of the region has a smaller pace, in seconds per minibatch."""


@dataclass
class ChargedPlans:
    """The search for the fastest plan of some regions with everything charged."""

    problem: Problem
    cuts: Cuts
    regions: list[Region]
    deadline: float | None = None
    gap: float = 0.0
    effort: SearchEffort = field(default_factory=SearchEffort)
    _terms: dict[tuple[PlanSpace, bool], tuple[HeterogeneousTerms, SharedResources]] = field(default_factory=dict)

    def best(self, known: ScoredPlan) -> BisectionResult[Plan]:
        """The fastest plan, at most as slow as the `known` one, with the bound reached."""
        regions = [self._with_floor(region) for region in self.regions if region.low_s < known.pace_s]
        if self.problem.options.flushes:
            return self._best_batch(regions, known)
        result = self._bisect(regions, known, memory=False)
        if result.best is None or not self.problem.options.memory or evaluate(result.best, self.problem).fits:
            return result
        if not result.finished:
            return replace(result, high=known.pace_s, best=known.plan)
        low = result.low
        regions = [replace(region, low_s=max(region.low_s, low)) for region in regions]
        return self._bisect(regions, known, memory=True)

    def _with_floor(self, region: Region) -> Region:
        resources = self._resources(region, memory=False)[1]
        return replace(region, low_s=max(region.low_s, resources.floor_s))

    def _resources(self, region: Region, *, memory: bool) -> tuple[HeterogeneousTerms, SharedResources]:
        """The terms of a region, with its shared resources."""
        key = region.space, memory
        if key not in self._terms:
            inner = region.space.inner(self.problem)
            if not memory:
                inner = replace(inner, options=replace(inner.options, memory=False))
            terms = HeterogeneousTerms(inner, self.cuts)
            self._terms[key] = terms, SharedResources(inner, self.problem, region.space, self.cuts, terms.runs)
        return self._terms[key]

    # -- the steady state --

    def _bisect(self, regions: list[Region], known: ScoredPlan, *, memory: bool) -> BisectionResult[Plan]:
        low = min(region.low_s for region in regions)

        def find(pace_s: float) -> tuple[float, Plan] | None:
            for region in regions:
                if region.low_s <= pace_s and (found := self._find(region, pace_s, memory=memory)) is not None:
                    return found.pace_s, found.plan
            return None

        start = known.pace_s, known.plan
        return threshold.least_threshold(find, low * (1 - PRECISION), known.pace_s, start, gap=self.gap)

    def _find(self, region: Region, pace_s: float, *, memory: bool) -> ScoredPlan | None:
        """A plan of a region with at most this pace, or None. Raises `OutOfTime`."""
        inner_s = region.space.inner_pace(self.problem, pace_s)
        if inner_s is None:
            return None
        terms, resources = self._resources(region, memory=memory)
        if terms.most_replicas < 1:
            return None
        searches = self._searches(region, terms)
        limits = searches.limits(memory=memory)
        for stages in searches.stage_counts(terms, limits):
            steps = find_charged_pipeline(
                terms, inner_s, replace(limits, exact_stages=stages), SharedLimit(resources, pace_s)
            )
            if steps is not None:
                plan = region.space.plan(self.problem, FoundPipeline(terms, steps).stages())
                return fastest_depths(plan, self.problem, pace_s, memory=memory)
        return None

    def _searches(self, region: Region, terms: HeterogeneousTerms) -> PipelineSearches:
        return PipelineSearches(terms.problem, self.cuts, self.deadline, self.gap, region.shape, effort=self.effort)

    # -- flush schedules --

    def _best_batch(self, regions: list[Region], known: ScoredPlan) -> BisectionResult[Plan]:
        best, result = known, BisectionResult[Plan](known.pace_s, known.pace_s, known.plan)
        lows = []
        try:
            for region in regions:
                if region.low_s >= best.pace_s * (1 - PRECISION):
                    continue
                low, best = self._best_of_region(region, best)
                lows.append(low)
        except OutOfTime:
            result.finished = False
        except KeyboardInterrupt:
            result.finished, result.interrupted = False, True
        if not result.finished:
            lows += [region.low_s for region in regions]
        return replace(result, low=min([best.pace_s, *lows]), high=best.pace_s, best=best.plan)

    def _best_of_region(self, region: Region, best: ScoredPlan) -> tuple[float, ScoredPlan]:
        """The bound of a region and the best plan so far. Raises `OutOfTime`."""
        low = region.low_s
        limit = best.pace_s
        while low < best.pace_s * (1 - 2 * PRECISION):
            bound, found = self._fastest_batch(region, limit, best.pace_s)
            if found is not None and found.pace_s < best.pace_s:
                best = found
            # Every plan is bound by the batches whose resources keep within the limit, or by the limit itself.
            low = max(low, min(bound, limit))
            limit = best.pace_s * (1 - PRECISION)
            if low < limit:
                limit = max((low * limit) ** 0.5, low * (1 + PRECISION)) if limit > low * 1.0003 else limit
        return min(low, best.pace_s), best

    def _fastest_batch(self, region: Region, limit_s: float, below_s: float) -> tuple[float, ScoredPlan | None]:
        """A bound on the pace of plans whose resources are busy for at most `limit_s`, and the best of them."""
        memory = self.problem.options.memory
        terms, resources = self._resources(region, memory=memory)
        count = self.problem.options.accumulate
        assert count is not None
        searches, best, bound = self._searches(region, terms), None, float("inf")
        limits = searches.limits(memory=memory)
        for stages in searches.stage_counts(terms, limits):
            batches = ChargedBatchObjective(
                terms, replace(limits, exact_stages=stages), SharedLimit(resources, limit_s)
            )
            answer = flush_search.fastest_batch(batches, 0.0, below_s * count)
            if not answer.finished:
                if answer.interrupted:
                    raise KeyboardInterrupt
                raise OutOfTime
            bound = min(bound, answer.bound_s / count)
            if answer.steps is not None:
                pace_s = max(answer.total_s / count, limit_s)
                plan = region.space.plan(self.problem, FoundPipeline(terms, answer.steps).stages())
                found = fastest_depths(plan, self.problem, pace_s, memory=memory)
                if best is None or found.pace_s < best.pace_s:
                    best = found
        return bound, best


def fastest_depths(plan: Plan, problem: Problem, pace_s: float, *, memory: bool) -> ScoredPlan:
    """The plan with the depths that let it run fastest where it keeps a pace, and with `memory` that fit."""

    def at(pace: float) -> ScoredPlan | None:
        assigned = depths.assign_depths(plan, problem, pace * (1 + 1e-12))
        score = evaluate(assigned, problem)
        fits = score.pace_s <= pace * (1 + PRECISION) and (score.fits or not memory)
        return ScoredPlan(score.pace_s, assigned) if fits else None

    best = at(pace_s)
    if best is None:
        # Rounding in another order made the plan miss the pace by a hair.
        assigned = depths.assign_depths(plan, problem, pace_s * (1 + PRECISION))
        return ScoredPlan(evaluate(assigned, problem).pace_s, assigned)
    if at(best.pace_s * (1 - 10 * PRECISION)) is None:
        return best
    low, high = 0.0, best.pace_s
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        better = at(middle)
        if better is None:
            low = middle
        else:
            best, high = better, min(middle, better.pace_s)
        if high - low <= high * PRECISION / 10:
            break
    return best
