"""Searches all spaces of plans without contention: one after another, or, with a flush, together.

A search for a batch of a flush schedule visits everything within its limit, so the limit must not be far above the
optimum. Therefore all spaces are searched with one limit before a larger limit is tried.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan.plan.schedules import ACCUMULATING, VERTICAL
from pipeplan.solvers.dp import threshold
from pipeplan.solvers.dp.budget import OutOfTime
from pipeplan.solvers.dp.cut_selection import cheap_cuts
from pipeplan.solvers.dp.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.results import BestSoFar, Region, SearchTask, tell_nobody
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces
from pipeplan.util.deadline import Deadline

_VERTICAL_SHARE = 0.75
"""Share of the remaining time that a space of plans may take under vertical sync, if another space follows."""

MOST_UNTIMED = 100
"""Number of spaces that are searched regardless of the time. A cluster of thousands of servers has thousands of
spaces."""


def search_spaces(task: SearchTask) -> BestSoFar:
    """Search all spaces of plans, one after another."""
    problem, so_far = task.problem, BestSoFar(task)
    spaces, options = plan_spaces(problem), problem.options
    floors = {space: space.floor(problem) for space in spaces}
    # Without a memory limit, a copy does not depend on the number of copies, unless they share something.
    shares = options.max_workers is not None or (problem.training and options.schedule in ACCUMULATING)
    without_memory: dict[PlanSpace, BisectionResult[FoundPipeline]] = {}
    # For each space, the smallest floor of the spaces after it.
    others = [*itertools.accumulate(reversed(floors.values()), min, initial=float("inf"))][-2::-1]
    for number, space in enumerate(spaces):
        known = None if shares else without_memory.get(replace(space, copies=1))
        low = floors[space] if known is None else space.step_time(problem, known.low)
        if so_far.excludes(low):
            so_far.regions.append(Region(space, None, low))
            continue
        if so_far.interrupted:
            so_far.stop(low)
            continue
        if number >= MOST_UNTIMED and Deadline(task.deadline).passed:
            so_far.leave(low)
            continue
        one = PipelineSearches(space.inner(problem), task.cuts, task.deadline, task.gap, effort=task.effort)
        if options.schedule == VERTICAL and number + 1 < len(spaces):
            # This search may take long to find a plan; a search for copies of a smaller pipeline finds one sooner.
            one.deadline = Deadline(task.deadline).share(_VERTICAL_SHARE).at
        one.report = so_far.watch(space, others[number])
        one.below, one.near = _below(space, so_far), task.near and so_far.best is None
        if known is not None and known.best is not None:
            one.without_memory = replace(known)
        elif known is not None:
            one.above = known.low
        try:
            so_far.add(space, one.best(), one.memory_binds)
        except KeyboardInterrupt:
            so_far.stop(low)
        if one.found_without_memory is not None:
            without_memory[replace(space, copies=1)] = one.found_without_memory
    return so_far


def _below(space: PlanSpace, so_far: BestSoFar) -> float:
    """The step time of one copy that a pipeline of a space has to beat; with a flush, the time between updates."""
    if so_far.limit_s == float("inf"):
        return float("inf")
    return space.inner_step_time(so_far.task.problem, so_far.limit_s) or 0.0


def search_batches(task: SearchTask) -> BestSoFar:
    """Search all spaces of plans under a flush schedule, together."""
    batches = BatchSpaces(task)
    found = batches.best()
    so_far = BestSoFar(task, finished=found.finished, interrupted=found.interrupted)
    if found.best is not None:
        space, pipeline = found.best
        so_far.best = found.high, space, pipeline
    if found.best is not None or not found.finished:
        so_far.bound = found.low
    so_far.regions = [Region(space, None, max(found.low, floor)) for space, floor in batches.floors.items()]
    return so_far


# If there are more cuts, a part of them is searched first, and a part of that part before.
_FEW_CUTS, _PART, _SHARE = 48, 4, 0.5

# The share of the time for a search for any plan that fits in memory.
_FITTING_SHARE = 0.2

# Relative gap of the search without the memory limit. Its plan usually does not fit, and then only gives a bound.
_BOUND_GAP = 0.01

FoundBatch = tuple[PlanSpace, FoundPipeline]


@dataclass
class BatchSpaces:
    """The search of all spaces. Limits and results are step times, in seconds per minibatch."""

    task: SearchTask
    later: float | None = None
    """The deadline that replaces the task's once a plan found without the memory limit fits; None to keep the
    task's."""

    @cached_property
    def searches(self) -> dict[PlanSpace, PipelineSearches]:
        """The searches by space, the most promising space first."""
        task = self.task
        spaces = sorted(plan_spaces(task.problem), key=self.floors.__getitem__)
        inner = {space: space.inner(task.problem) for space in spaces}
        return {
            space: PipelineSearches(inner[space], task.cuts, task.deadline, task.gap, effort=task.effort)
            for space in spaces
        }

    @cached_property
    def floors(self) -> dict[PlanSpace, float]:
        """For every space, a lower bound on the step times in it."""
        return {space: space.floor(self.task.problem) for space in plan_spaces(self.task.problem)}

    def best(self) -> BisectionResult[FoundBatch]:
        """The fastest plan. The result's `best` is None if there is no plan or none was found in time."""
        low, limited = min(self.floors.values()), self.task.problem.options.memory
        if not limited:
            return self._refined(low, memory=False)
        # A plan that was found without the memory limit only gives a bound, so that search gets only a part of the
        # time.
        halfway = Deadline(self.task.deadline).share(_SHARE).at
        task = replace(self.task, deadline=halfway, gap=max(self.task.gap, _BOUND_GAP))
        searched = BatchSpaces(task, later=self.task.deadline)
        bound = searched._refined(low, memory=False)
        fits = bound.best is not None and self._fits(bound)
        enough = bound.low * (1 + max(2 * PRECISION, self.task.gap))
        if fits and bound.finished and bound.best is not None and bound.high > enough:
            bound = self._least(bound.low, (bound.high, bound.best), memory=False)
            fits = bound.best is not None and self._fits(bound)
        if bound.interrupted or (bound.finished and (fits or bound.best is None)):
            return bound if fits or bound.finished else replace(bound, high=float("inf"), best=None)
        if fits and bound.best is not None:
            return self._least(bound.low, (bound.high, bound.best), memory=True)
        fitting = self._fitting(bound.low)
        result = self._refined(bound.low, memory=True)
        if result.best is not None or result.finished or fitting is None:
            return result
        return replace(result, high=fitting[0], best=fitting[1])

    def _fitting(self, low: float) -> tuple[float, FoundBatch] | None:
        """Any plan that fits in memory, in case the search ends before it finds one; None if none is found in time.

        If few plans fit in memory, all of them may be far above the bound `low`, where the search begins.
        """
        if self.task.deadline is None or self.task.near:
            return None
        ends = Deadline(self.task.deadline).share(_FITTING_SHARE).at
        try:
            for space, search in self.searches.items():
                if (found := search.fitting(ends)) is not None:
                    step_time_s = space.step_time(self.task.problem, found[0])
                    self.task.report(low, step_time_s)
                    return step_time_s, (space, found[1])
        except OutOfTime:
            return None
        return None

    def _fits(self, result: BisectionResult[FoundBatch]) -> bool:
        assert result.best is not None
        space, pipeline = result.best
        return pipeline.fits(self.searches[space].limited, result.high)

    def _refined(self, low: float, *, memory: bool) -> BisectionResult[FoundBatch]:
        """The fastest plan, given the lower bound `low`. If there are many cuts, a selection of them is searched first.

        The selection gives a good plan soon, and thus a tight limit for the search over all cuts.
        """
        count, known = len(self.task.cuts.ideals), None
        if self.task.near and self.task.useful_s < float("inf"):
            return self._least(low, None, memory=memory)
        if count > _FEW_CUTS:
            selected = self.task.cuts.only(cheap_cuts(self.task.cuts, max(_FEW_CUTS // 2, count // _PART)))
            deadline = Deadline(self.task.deadline).share(_SHARE).at
            task = replace(self.task, cuts=selected, deadline=deadline, report=tell_nobody, near=False)
            found = BatchSpaces(task)._refined(low, memory=memory)
            if found.interrupted:
                raise KeyboardInterrupt
            known = None if found.best is None else (found.high, found.best)
            if self.later is not None and known is not None and self._fits(found):
                self.task.report(low, known[0])
                task = replace(self.task, deadline=self.later)
                return replace(self, task=task)._least(low, known, memory=memory)
            if known is not None and (memory or not self.task.problem.options.memory):
                self.task.report(low, known[0])
        elif memory:
            # If memory limits the plans, the optimum may be far above the bound. A coarse search finds some plan soon.
            some = self._least(low, None, memory=True, coarse=True)
            known = None if some.best is None else (some.high, some.best)
        return self._least(low, known, memory=memory)

    def _least(
        self, low: float, known: tuple[float, FoundBatch] | None, *, memory: bool, coarse: bool = False
    ) -> BisectionResult[FoundBatch]:
        """The fastest plan, given the lower bound `low` on its step time, with or without the memory limit."""
        # A plan that was found without the memory limit only gives a bound.
        counts = memory or not self.task.problem.options.memory
        most = max(
            space.step_time(self.task.problem, search.most(memory=memory)) for space, search in self.searches.items()
        )
        if self.task.useful_s < low:
            return BisectionResult(low)

        def find(step_time_s: float) -> tuple[float, FoundBatch] | None:
            return self._find(step_time_s, memory=memory, coarse=coarse)

        def report(least: float, best: float) -> None:
            self.task.report(least, best if counts else float("inf"))

        if self.task.near and self.task.useful_s < most:
            return threshold.least_near(find, low, self.task.useful_s, report, self.task.gap, finds_least=True)
        # Few plans have one stage, so one search finds the fastest, or shows that none fits.
        least = 0.0 if self.task.problem.options.stages == 1 else low * (1 - PRECISION)
        ends = least, min(most, self.task.useful_s)
        return threshold.least_threshold(find, *ends, known, gap=self.task.gap, report=report, finds_least=True)

    def _find(self, step_time_s: float, *, memory: bool, coarse: bool) -> tuple[float, FoundBatch] | None:
        """The fastest plan of all spaces with at most this step time, or None. Raises `OutOfTime`."""
        found: tuple[float, FoundBatch] | None = None
        for space, search in self.searches.items():
            limit = step_time_s if found is None else found[0] * (1 - PRECISION)
            inner_s = space.inner_step_time(self.task.problem, limit)
            if inner_s is None or self.floors[space] > limit:
                continue
            result = search.within(inner_s, memory=memory, coarse=coarse)
            if result is not None:
                found = space.step_time(self.task.problem, result[0]), (space, result[1])
        return found
