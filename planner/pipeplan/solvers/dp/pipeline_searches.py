"""Finds the fastest pipeline on one component of the cluster: first without a memory limit, then with it if needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipeplan.plan.plan import Stage
from pipeplan.problem.cuts import Cuts, Flags
from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import cut_selection, threshold
from pipeplan.solvers.dp.budget import OutOfTime, SearchEffort, SearchLimits, StateCounts, Step, limits_of
from pipeplan.solvers.dp.cut_selection import prune_cuts
from pipeplan.solvers.dp.find_pipeline import (
    find_pipeline,
    limits_range,
    pipeline_fits,
    pipeline_step_time,
    terms_of,
)
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.util.deadline import Deadline

# Largest product of cuts and workers of a small search, which returns the best plan with the fewest stages.
# With a memory limit, a small search first looks for any plan within `_FIRST_LIMIT` times the bound.
_SMALL_SEARCH = 100_000
_FIRST_LIMIT = 8

# With more than twice `SELECTED_CUTS` cuts, a search under a memory limit first uses a selection, with this gap.
_SELECTED_GAP = 0.01
# The share of the remaining time that a search on selected cuts may take.
SELECTED_SHARE = 0.2
# From this number of cuts on, the search improves a plan on selections of the cuts before a search on all cuts.
_REFINED_CUTS = 300
# The share of the remaining time for a search on all cuts right below the best pipeline.
_PROOF_SHARE = 0.6


@dataclass(frozen=True)
class FoundPipeline:
    """A pipeline found by a search, with the cost terms of that search, which include its cuts."""

    terms: CostTerms
    steps: list[Step]

    def fits(self, limited: CostTerms, step_time: float) -> bool:
        """Whether the pipeline fits in memory at the depths that its step time needs; `limited` has terms with the
        memory limit.
        """
        return pipeline_fits(limited, self.steps_among(limited.cuts), step_time)

    def steps_among(self, cuts: Cuts) -> list[Step]:
        """The steps with their cuts numbered as in `cuts`, which contains all of these cuts."""
        index_of = {ideal: index for index, ideal in enumerate(cuts.ideals)}
        cut_of = [index_of.get(ideal, -1) for ideal in self.terms.cuts.ideals]
        return [replace(step, start=cut_of[step.start], end=cut_of[step.end]) for step in self.steps]

    def stages(self) -> list[Stage]:
        """The stages of one copy with the names of their layers. The stages' weight versions are not set yet."""
        units, cuts = self.terms.problem.units, self.terms.cuts
        return [
            Stage(
                tuple(name for unit in cuts.members(step.start, step.end) for name in units[unit].layers),
                tuple(range(step.first, step.first + step.replicas)),
                step.depth,
                1,
                step.recompute,
            )
            for step in self.steps
        ]


@dataclass
class PipelineSearches:
    """The searches on one component of the cluster."""

    problem: Problem
    cuts: Cuts
    deadline: float | None = None
    gap: float = 0.0
    shape: GridShape | None = None
    """The shape of the uniform grid to search for; None for any plan."""
    above: float = 0.0
    """A known lower bound, in the unit of `best`."""
    below: float = float("inf")
    """Limit of the search: slower pipelines are not searched for."""
    near: bool = False
    """Whether the fastest pipeline is probably just below `below`, or slower."""
    effort: SearchEffort = field(default_factory=SearchEffort)

    report: Callable[[float, float], None] = lambda low, high: None
    """A function that is called with the bound and the step time of the best pipeline as they change. The step time is
    infinite while there is no pipeline."""

    without_memory: BisectionResult[FoundPipeline] | None = None
    """The best pipeline without a memory limit, if it is known."""
    found_without_memory: BisectionResult[FoundPipeline] | None = None
    """The best pipeline without a memory limit that `best` has found; None until it is certain."""
    memory_binds: bool = False
    """Whether `best` found that the fastest pipeline without a memory limit does not fit."""

    def for_shape(
        self,
        shape: GridShape,
        above: float = 0.0,
        below: float = float("inf"),
        without_memory: BisectionResult[FoundPipeline] | None = None,
    ) -> PipelineSearches:
        """Searches for a uniform grid of this shape only. The new searches share the cost terms with these searches."""
        searches = replace(self, shape=shape, above=above, below=below, without_memory=without_memory)
        searches.__dict__.update({"unlimited": self.unlimited, "limited": self.limited})
        return searches

    @cached_property
    def unlimited(self) -> CostTerms:
        """The cost terms without a memory limit."""
        problem = self.problem.without_memory_limit()
        # Stages without cost may vanish when cuts are left out, but a grid has a fixed number of stages.
        return terms_of(problem, self.cuts if problem.options.grid else prune_cuts(problem, self.cuts))

    @cached_property
    def limited(self) -> CostTerms:
        """The cost terms with the memory limit."""
        return terms_of(self.problem, self.cuts)

    def feasible(self) -> bool:
        """Whether any pipeline satisfies the constraints, however slow.

        Raises `OutOfTime` if the answer is not known in time.
        """
        return self.fitting(self.deadline) is not None

    def best(self) -> BisectionResult[FoundPipeline]:
        """The fastest pipeline. The result's `best` is None if no pipeline exists or none was found in time.

        The step time is in seconds per minibatch of one copy, or, with a flush, in seconds per update.
        """
        if self.unlimited.most_replicas < 1:
            return BisectionResult(float("inf"))
        limits = self.limits(memory=False)
        low = max(limits_range(self.unlimited)[0], self.above)
        interval = self.without_memory
        if interval is None:
            interval = self._least(self.unlimited, limits, low)
        if interval.finished:
            self.found_without_memory = replace(interval)
        if interval.best is None:
            return interval
        if interval.finished:
            if self.without_memory is None or self.shape is not None:
                interval.best = self._with_fewest_stages(limits, interval.high) or interval.best
            self.found_without_memory = replace(interval)
        if not self.problem.options.memory or interval.best.fits(self.limited, interval.high):
            return interval
        if not interval.finished:
            interval.high, interval.best = float("inf"), None
            return interval
        self.memory_binds = True
        limits, low = self.limits(memory=True), interval.low
        if not self.has_many_cuts or self.shape is not None or self._near_limit:
            return self._least(self.limited, limits, low)
        known, finished = self._on_selected_cuts(low)
        return self._least(self.limited, limits, low, known, near=finished)

    def _on_selected_cuts(self, low: float) -> tuple[tuple[float, FoundPipeline] | None, bool]:
        """(a fast pipeline that fits in memory, whether the time sufficed), found on selections of the cuts."""
        deadline = Deadline(self.deadline).share(SELECTED_SHARE).at
        limits = replace(self.limits(memory=True), deadline=deadline)
        silent = replace(self, gap=max(self.gap, _SELECTED_GAP), report=lambda low, high: None)
        found = silent._least(terms_of(self.problem, self.selected_cuts), limits, low)
        if found.interrupted:
            raise KeyboardInterrupt
        if found.best is None:
            return None, found.finished
        self.report(low, found.high)
        known = found.high, found.best
        # In a graph with branches, many cuts have nearly the same work but differ in the bytes that cross them.
        if not found.finished or len(self.cuts.ideals) < _REFINED_CUTS or not self.cuts.chain:
            return known, False
        return self._refined(known, low, deadline), True

    def _refined(
        self, known: tuple[float, FoundPipeline], low: float, deadline: float | None
    ) -> tuple[float, FoundPipeline]:
        """A pipeline that fits in memory and is at least as fast as the `known` one.

        The stages of this pipeline end near those of `known`.
        """
        limits = replace(self.limits(memory=True), deadline=deadline)

        def masks(around: FoundPipeline) -> list[Flags]:
            return cut_selection.selections(self.cuts, [step.start for step in around.steps_among(self.cuts)[1:]])

        for number in range(len(masks(known[1]))):

            def find(around: FoundPipeline, limit: float, number: int = number) -> tuple[float, FoundPipeline] | None:
                return self._found(terms_of(self.problem, self.cuts.only(masks(around)[number])), limit, limits)

            known = cut_selection.refined_result(
                find, known, low * (1 + self.gap), lambda step_time: self.report(low, step_time)
            )
        return known

    @property
    def _near_limit(self) -> bool:
        return self.near and self.below < float("inf")

    @property
    def has_many_cuts(self) -> bool:
        """Whether there are so many cuts that `cut_selection` leaves out most of them."""
        return len(self.cuts.ideals) > 2 * cut_selection.SELECTED_CUTS

    @property
    def selected_cuts(self) -> Cuts:
        """The selected cuts on which a fast plan is searched first if there are many cuts."""
        return self.cuts.only(cut_selection.cheap_cuts(self.cuts))

    def stage_counts(self, terms: CostTerms, limits: SearchLimits) -> list[int | None]:
        """The numbers of stages to search separately, because they decide which stage a pinned layer is in."""
        lowest = max((stage for _, stage in self.problem.options.pins), default=1)
        if limits.exact_stages is not None and lowest > limits.exact_stages:
            return []
        if not self.problem.options.pins or limits.exact_stages is not None:
            return [limits.exact_stages]
        highest = min(limits.max_stages or terms.workers, terms.workers, len(terms.cuts.ideals) - 1)
        return list(range(lowest, highest + 1))

    def limits(self, *, memory: bool) -> SearchLimits:
        """The limits of one search, with or without the memory limit."""
        return limits_of(self.problem, memory=memory, deadline=self.deadline, shape=self.shape, effort=self.effort)

    def most(self, *, memory: bool) -> float:
        """A limit that excludes no pipeline."""
        return limits_range(self.limited if memory else self.unlimited)[1]

    def fitting(self, deadline: float | None) -> tuple[float, FoundPipeline] | None:
        """Any pipeline that fits in memory, with its step time or the time of its batch; None if there is none.

        Raises `OutOfTime` if the answer is not known in time.
        """
        limits = replace(self.limits(memory=True), fitting=True, deadline=deadline)
        return None if self.limited.most_replicas < 1 else self._found(self.limited, self.most(memory=True), limits)

    def within(self, limit: float, *, memory: bool, coarse: bool = False) -> tuple[float, FoundPipeline] | None:
        """A pipeline within a limit and its step time, or None; with a flush the fastest pipeline. Raises `OutOfTime`.

        A `coarse` search (`SearchLimits`) may find none although there is one.
        """
        terms = self.limited if memory else self.unlimited
        limits = replace(self.limits(memory=memory), coarse=coarse)
        return None if terms.most_replicas < 1 else self._found(terms, limit, limits)

    def _least(
        self,
        terms: CostTerms,
        limits: SearchLimits,
        low: float,
        known: tuple[float, FoundPipeline] | None = None,
        *,
        near: bool = False,
    ) -> BisectionResult[FoundPipeline]:
        """The fastest pipeline, by bisection between the lower bound `low` and a `known` step time with its pipeline.

        With `near`, the known step time is probably close to the smallest.
        """

        # A pipeline that was found without the memory limit only gives a bound, unless it fits.
        counts, fitting = limits.memory or not self.problem.options.memory, float("inf")

        def find(limit: float) -> tuple[float, FoundPipeline] | None:
            nonlocal fitting
            found = self._found(terms, limit, limits)
            if not counts and found is not None and found[0] < fitting and found[1].fits(self.limited, found[0]):
                fitting = found[0]
                self.report(low, fitting)
            return found

        most = min(limits_range(terms)[1], self.below)
        if most < low:
            return BisectionResult(low)
        flushes = self.problem.options.flushes
        if self._near_limit and known is None:
            return threshold.least_near(find, low, most, gap=self.gap, finds_least=flushes)
        known = known if known is not None and known[0] <= most else None
        tried = self._tried_first(terms, limits, low, most) if known is None else []
        try:
            for limit in tried:
                known = known or find(limit)
        except OutOfTime:
            return BisectionResult(low, finished=False)
        except KeyboardInterrupt:
            return BisectionResult(low, finished=False, interrupted=True)
        if tried and known is None:
            return BisectionResult(most)
        return threshold.least_threshold(
            find,
            low * (1 - PRECISION),
            most,
            known,
            gap=self.gap,
            report=lambda least, best: self.report(least, best if counts else fitting),
            near=self._near(terms, limits, low) if near and not flushes else None,
            finds_least=flushes,
        )

    def _near(self, terms: CostTerms, limits: SearchLimits, low: float) -> threshold.NearLeast[FoundPipeline]:
        """The functions by which the search continues from the pipeline that was found on selections of the cuts."""
        hurried = replace(limits, deadline=Deadline(self.deadline).share(_PROOF_SHARE).at)
        return threshold.NearLeast(
            lambda limit: self._found(terms, limit, hurried),
            lambda known: self._refined(known, low, hurried.deadline),
        )

    def _found(self, terms: CostTerms, limit: float, limits: SearchLimits) -> tuple[float, FoundPipeline] | None:
        """A pipeline within a limit and its step time, or None. Raises `OutOfTime`."""
        steps = self._search(terms, limit, limits)
        if steps is None:
            return None
        depths = limits.memory or terms.accumulate is not None
        return pipeline_step_time(terms, steps, depths=depths), FoundPipeline(terms, steps)

    def _tried_first(self, terms: CostTerms, limits: SearchLimits, low: float, most: float) -> list[float]:
        """The limits that are tried before bisection. If no pipeline is found for any, there is none up to `most`."""
        if self.problem.options.flushes:
            # A search for the fastest batch takes long far above the bound, and little time near it.
            return []
        if self.below < limits_range(terms)[1] and self.shape is None:
            # Most spaces have no faster plan than the best so far, and a single search shows it.
            return [most]
        if limits.memory and len(terms.cuts.ideals) * terms.workers <= _SMALL_SEARCH:
            # Find some plan first: it is the result if the search is stopped early, and without one no search is
            # needed. On thousands of workers a search far above the bound takes longer than all searches near it.
            return [min(_FIRST_LIMIT * low, most), most]
        return []

    def _search(self, terms: CostTerms, limit: float, limits: SearchLimits) -> list[Step] | None:
        """A pipeline within a threshold, among all numbers of stages, or None; with a flush the fastest pipeline."""
        found: list[tuple[float, list[Step]]] = []
        for stages in self.stage_counts(terms, limits):
            steps = find_pipeline(terms, limit, replace(limits, exact_stages=stages))
            if steps is not None and not self.problem.options.flushes:
                return steps
            if steps is not None:
                found.append((pipeline_step_time(terms, steps, depths=limits.memory), steps))
        return min(found, key=lambda one: one[0])[1] if found else None

    def _with_fewest_stages(self, limits: SearchLimits, step_time: float) -> FoundPipeline | None:
        """The pipeline with the fewest stages among equally fast ones; None if finding it takes long."""
        terms = self.unlimited
        if len(terms.cuts.ideals) * terms.workers > _SMALL_SEARCH or limits.counting.any:
            return None
        try:
            steps = self._search(terms, step_time * (1 + 1e-10), replace(limits, counting=StateCounts(stages=True)))
        except OutOfTime:
            return None
        return None if steps is None else FoundPipeline(terms, steps)
