"""Exact dynamic programming over cuts: the fastest pipeline on consecutive workers, idle ones allowed.

`search` decides whether any pipeline keeps within a threshold, and `threshold` finds the least one for which there is.
First without a limit on memory, where depths do not matter and many cuts cannot (`reduce`): if that plan fits in memory
it is the best of all. If not, the search goes on upwards from there, with memory, and with recomputation where allowed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan.cuts import Cuts
from pipeplan.problem import Problem
from pipeplan.solvers import depths, flush, threshold
from pipeplan.solvers.limits import Limits, OutOfTime, Step, limits_of
from pipeplan.solvers.machines import batches, fits, pace_of, search, terms_of
from pipeplan.solvers.pipeline import Segment, Space, spaces
from pipeplan.solvers.reduce import reduced
from pipeplan.solvers.result import Result, Status
from pipeplan.solvers.states import Counting
from pipeplan.solvers.terms import Terms
from pipeplan.solvers.threshold import PRECISION, Interval

# Up to so many cuts times workers, of all best plans one with the fewest stages is returned, and a first plan is looked
# for where memory limits.
_TIDY = 100_000


# Where memory limits, a plan is looked for first within so many times the bound.
_GENEROUS = 8


@dataclass(frozen=True)
class Pipeline:
    """What a search found, with the terms (and so the cuts) that it was found by."""

    terms: Terms
    steps: list[Step]

    def fits(self, bound: Terms, pace: float) -> bool:
        """Whether it fits in memory at the depths that its pace needs, by terms with a limit on memory."""
        place = {ideal: index for index, ideal in enumerate(bound.cuts.ideals)}
        ideals = self.terms.cuts.ideals
        steps = [replace(step, start=place[ideals[step.start]], end=place[ideals[step.end]]) for step in self.steps]
        return fits(bound, steps, pace)

    def segments(self) -> list[Segment]:
        """The stages by the names of their layers."""
        units, cuts = self.terms.problem.units, self.terms.cuts
        return [
            Segment(
                tuple(name for unit in cuts.members(step.start, step.end) for name in units[unit].layers),
                step.first,
                step.replicas,
                step.depth,
                step.recompute,
            )
            for step in self.steps
        ]


@dataclass
class Pipelines:
    """The searches on one component of the cluster."""

    problem: Problem
    cuts: Cuts
    deadline: float | None = None
    gap: float = 0.0

    @cached_property
    def free(self) -> Terms:
        """Without a limit on memory."""
        problem = replace(self.problem, options=replace(self.problem.options, memory=False))
        return terms_of(problem, reduced(problem, self.cuts))

    @cached_property
    def bound(self) -> Terms:
        """With it."""
        return terms_of(self.problem, self.cuts)

    def feasible(self) -> bool:
        """Whether any pipeline satisfies the constraints, however slow."""
        if self.problem.options.flushes:
            return self._best_batch().best is not None
        if self.bound.most_replicas < 1:
            return False
        return self._search(self.bound, self.bound.most, self._limits(memory=True)) is not None

    def best(self) -> Interval[Pipeline]:
        """The fastest pipeline. `best` of the answer is None where there is none (or none was found in time).

        Its pace is in seconds per minibatch of one copy; with a flush in seconds per update.
        """
        if self.problem.options.flushes:
            return self._best_batch()
        if self.free.most_replicas < 1:
            return Interval(float("inf"))
        limits = self._limits(memory=False)
        found = self._least(self.free, limits, self.free.floor)
        if found.best is None:
            return found
        if found.finished:
            found.best = self._tidy(limits, found.high) or found.best
        if not self.problem.options.memory or found.best.fits(self.bound, found.high):
            return found
        if not found.finished:
            found.high, found.best = float("inf"), None
            return found
        return self._least(self.bound, self._limits(memory=True), found.low)

    def _best_batch(self) -> Interval[Pipeline]:
        """The same for the schedules that drain before every update."""
        limits = self._limits(memory=False)
        if not self.problem.options.memory:
            return self._least_batch(self.free, limits)
        # What is found without a limit on memory is a bound, and no plan: half of the time is for that.
        free = self._least_batch(self.free, replace(limits, deadline=threshold.halfway(self.deadline)))
        if free.interrupted or (free.finished and free.best is None):
            return replace(free, high=float("inf"), best=None)
        limits = self._limits(memory=True)
        found = self._least_batch(self.bound, replace(limits, recompute=False))
        if limits.recompute and found.finished and found.high > free.low * (1 + PRECISION):
            again = self._least_batch(self.bound, limits)
            if again.high > found.high:
                again.high, again.best = found.high, found.best
            found = again
        found.low = max(found.low, free.low)
        return found

    def _least_batch(self, terms: Terms, limits: Limits) -> Interval[Pipeline]:
        found = Interval[Pipeline](float("inf"))
        counts = self._stage_counts(terms, limits)
        for exact in counts:
            answer = flush.best(batches(terms, replace(limits, exact_stages=exact)))
            found.low = min(found.low, answer.bound_s)
            if answer.steps is not None and answer.total_s < found.high:
                found.high, found.best = answer.total_s, Pipeline(terms, answer.steps)
            found.finished, found.interrupted = answer.finished, answer.interrupted
            if not answer.finished:
                # Nothing is known of the numbers of stages that were not tried.
                found.low = found.low if exact == counts[-1] else 0.0
                break
        return found

    def _stage_counts(self, terms: Terms, limits: Limits) -> list[int | None]:
        """The numbers of stages to be tried one by one: which stage a layer is in depends on how many there are."""
        lowest = max((stage for _, stage in self.problem.options.pins), default=1)
        if limits.exact_stages is not None and lowest > limits.exact_stages:
            return []
        if not self.problem.options.pins or limits.exact_stages is not None:
            return [limits.exact_stages]
        highest = min(limits.max_stages or terms.workers, terms.workers, len(terms.cuts.ideals) - 1)
        return list(range(lowest, highest + 1))

    def _limits(self, *, memory: bool) -> Limits:
        return limits_of(self.problem, memory=memory, deadline=self.deadline)

    def _least(self, terms: Terms, limits: Limits, low: float) -> Interval[Pipeline]:
        def ask(limit: float) -> tuple[float, Pipeline] | None:
            steps = self._search(terms, limit, limits)
            if steps is None:
                return None
            depths = limits.memory or terms.accumulate is not None
            return pace_of(terms, steps, depths=depths), Pipeline(terms, steps)

        known = None
        if limits.memory and len(terms.cuts.ideals) * terms.workers <= _TIDY:
            # Some plan, for whoever stops the search early; and where there is none, nothing is looked for. On
            # thousands of workers a search far above the bound takes longer than all those near it.
            try:
                known = ask(min(_GENEROUS * low, terms.most)) or ask(terms.most)
            except OutOfTime:
                return Interval(low, finished=False)
            except KeyboardInterrupt:
                return Interval(low, finished=False, interrupted=True)
            if known is None:
                return Interval(low)
        return threshold.least(ask, low * (1 - PRECISION), terms.most, known, gap=self.gap)

    def _search(self, terms: Terms, limit: float, limits: Limits) -> list[Step] | None:
        for stages in self._stage_counts(terms, limits):
            steps = search(terms, limit, replace(limits, exact_stages=stages))
            if steps is not None:
                return steps
        return None

    def _tidy(self, limits: Limits, pace: float) -> Pipeline | None:
        """Of equally fast pipelines one with the fewest stages, where that is quick to find."""
        terms = self.free
        if len(terms.cuts.ideals) * terms.workers > _TIDY or limits.counting.any:
            return None
        steps = self._search(terms, pace * (1 + 1e-10), replace(limits, counting=Counting(stages=True)))
        return None if steps is None else Pipeline(terms, steps)


def feasible(problem: Problem, cuts: Cuts) -> bool:
    """Whether any plan satisfies the constraints, however slow."""
    return any(Pipelines(space.inner(problem), cuts).feasible() for space in spaces(problem))


def solve(problem: Problem, cuts: Cuts, seconds: float | None = None, gap: float = 0.0) -> Result:
    """The best plan over both plan spaces (see `pipeline`), proven by a search just below its pace that finds nothing.

    A limit of `seconds`, a relative `gap` that is small enough, or Ctrl-C ends it with the best plan so far and the
    bound reached.
    """
    began, deadline = time.perf_counter(), threshold.deadline(seconds)
    best: tuple[float, Space, list[Segment]] | None = None
    bound, finished, interrupted = float("inf"), True, False
    for space in spaces(problem):
        if best is not None and space.synchronisation(problem) >= best[0]:
            continue
        if interrupted:
            bound = min(bound, space.pace(problem, 0.0))
            continue
        found = Pipelines(space.inner(problem), cuts, deadline, gap).best()
        finished, interrupted = finished and found.finished, interrupted or found.interrupted
        if found.best is not None or not found.finished:
            bound = min(bound, space.pace(problem, found.low))
        if found.best is not None and (best is None or space.pace(problem, found.high) < best[0] * (1 - PRECISION)):
            best = (space.pace(problem, found.high), space, found.best.segments())
    floor = problem.work_s / problem.cluster.total_speed
    note = "within the gap asked for" if finished else "stopped before it was proven"
    if not cuts.complete:
        bound, note = floor, f"searched {len(cuts.ideals)} of the cuts of the graph, not all"
    proven = finished and cuts.complete
    taken = time.perf_counter() - began
    if best is None:
        status = Status.INFEASIBLE if proven else Status.TIME_LIMIT
        least = float("inf") if proven else max(floor, bound if bound < float("inf") else 0.0)
        return Result("DP", status, None, float("inf"), least, taken, note, interrupted=interrupted)
    pace, space, segments = best
    # The pace may be just where a depth changes: another order of the same sum must not ask for one more.
    plan = depths.assign(space.plan(problem, segments), problem, pace * (1 + 1e-12))
    if proven and bound >= pace * (1 - 4 * PRECISION):
        return Result("DP", Status.OPTIMAL, plan, pace, pace, taken)
    return Result("DP", Status.FEASIBLE, plan, pace, min(max(bound, floor), pace), taken, note, interrupted=interrupted)
