"""The fastest batch under a flush schedule over all spaces of plans at once, every shared resource to itself.

A search for a batch goes over everything within its limit, so the limit must not be far above the optimum. Therefore
all spaces are searched for one limit before a longer one is tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan.solvers.dp import threshold
from pipeplan.solvers.dp.cuts.selected_cuts import cheap_cuts
from pipeplan.solvers.dp.pipelines.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.spaces.search_task import SearchTask, tell_nobody
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces
from pipeplan.util.deadline import Deadline

# Of more cuts, a part of them is searched first, and of these a part in turn.
_FEW_CUTS, _PART, _SHARE = 48, 4, 0.5

# The bound that plans without the memory limit give is searched for to this relative distance first, because it mostly
# is no plan.
_BOUND_GAP = 0.01

FoundBatch = tuple[PlanSpace, FoundPipeline]


@dataclass
class BatchSpaces:
    """The search of all spaces. Limits and results are paces, in seconds per minibatch."""

    task: SearchTask
    later: float | None = None
    """The deadline in place of the task's once a plan that was found without the memory limit fits; None for none."""

    @cached_property
    def searches(self) -> dict[PlanSpace, PipelineSearches]:
        """The searches of every space with a floor, the most promising first."""
        task = self.task
        spaces = sorted(plan_spaces(task.problem), key=self.floors.__getitem__)
        inner = {space: space.inner(task.problem) for space in spaces}
        return {
            space: PipelineSearches(inner[space], task.cuts, task.deadline, task.gap, effort=task.effort)
            for space in spaces
        }

    @cached_property
    def floors(self) -> dict[PlanSpace, float]:
        """For every space, a lower bound on the paces in it."""
        return {space: space.floor(self.task.problem) for space in plan_spaces(self.task.problem)}

    def best(self) -> BisectionResult[FoundBatch]:
        """The fastest plan. The result's `best` is None where there is none or none was found in time."""
        low, limited = min(self.floors.values()), self.task.problem.options.memory
        if not limited:
            return self._refined(low, memory=False)
        # A plan that was found without the memory limit is only a bound, so that search gets a part of the time.
        halfway = Deadline(self.task.deadline).share(_SHARE).at
        task = replace(self.task, deadline=halfway, gap=max(self.task.gap, _BOUND_GAP))
        searched = BatchSpaces(task, later=self.task.deadline)
        bound = searched._refined(low, memory=False)
        fits = bound.best is not None and self._fits(bound)
        if fits and bound.finished and bound.best is not None and self._is_open(bound):
            bound = self._least(bound.low, (bound.high, bound.best), memory=False)
            fits = bound.best is not None and self._fits(bound)
        if bound.interrupted or (bound.finished and (fits or bound.best is None)):
            return bound if fits or bound.finished else replace(bound, high=float("inf"), best=None)
        if fits and bound.best is not None:
            return self._least(bound.low, (bound.high, bound.best), memory=True)
        return self._refined(bound.low, memory=True)

    def _is_open(self, result: BisectionResult[FoundBatch]) -> bool:
        """Whether a result is less close to the bound than is asked for."""
        return result.high > result.low * (1 + max(2 * PRECISION, self.task.gap))

    def _fits(self, result: BisectionResult[FoundBatch]) -> bool:
        assert result.best is not None
        space, pipeline = result.best
        return pipeline.fits(self.searches[space].limited, result.high)

    def _refined(self, low: float, *, memory: bool) -> BisectionResult[FoundBatch]:
        """The fastest plan with at least the pace `low`, from that of a selection of the cuts, where there are many.

        The selection gives a good plan soon, which is a tight limit for the search over all cuts.
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
            # Where memory binds, the optimum may be far above the bound: a coarse search finds some plan soon.
            some = self._least(low, None, memory=True, coarse=True)
            known = None if some.best is None else (some.high, some.best)
        return self._least(low, known, memory=memory)

    def _least(
        self, low: float, known: tuple[float, FoundBatch] | None, *, memory: bool, coarse: bool = False
    ) -> BisectionResult[FoundBatch]:
        """The fastest plan with at least the pace `low`, with or without the memory limit."""
        # A plan that was found without the memory limit is only a bound.
        counts = memory or not self.task.problem.options.memory
        most = max(space.pace(self.task.problem, search.most(memory=memory)) for space, search in self.searches.items())
        if self.task.useful_s < low:
            return BisectionResult(low)

        def find(pace_s: float) -> tuple[float, FoundBatch] | None:
            return self._find(pace_s, memory=memory, coarse=coarse)

        def report(least: float, best: float) -> None:
            self.task.report(least, best if counts else float("inf"))

        if self.task.near and self.task.useful_s < most:
            return threshold.least_near(find, low, self.task.useful_s, report, self.task.gap, finds_least=True)
        ends = low * (1 - PRECISION), min(most, self.task.useful_s)
        return threshold.least_threshold(find, *ends, known, gap=self.task.gap, report=report, finds_least=True)

    def _find(self, pace_s: float, *, memory: bool, coarse: bool) -> tuple[float, FoundBatch] | None:
        """The fastest plan of all spaces with at most this pace, or None. Raises `OutOfTime`."""
        found: tuple[float, FoundBatch] | None = None
        for space, search in self.searches.items():
            limit = pace_s if found is None else found[0] * (1 - PRECISION)
            inner_s = space.inner_pace(self.task.problem, limit)
            if inner_s is None or self.floors[space] > limit:
                continue
            result = search.within(inner_s, memory=memory, coarse=coarse)
            if result is not None:
                found = space.pace(self.task.problem, result[0]), (space, result[1])
        return found
