"""The task of the dynamic program, the best plan and bound of its searches so far, and the final result.

`SearchTask` has the problem and the limits of the search. The spaces of plans are searched one after another, and
`BestSoFar` keeps the best plan and the bound over all of them. `found_result` has the plan, its step time, and what is
proven about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeplan.cost import contention, depths
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import SearchEffort
from pipeplan.solvers.dp.pipeline_searches import FoundPipeline
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.plan_space import PlanSpace
from pipeplan.solvers.result import Result, Status


def tell_nobody(bound_s: float, best_s: float) -> None:
    """A report function that does nothing."""


@dataclass(frozen=True)
class SearchTask:
    """One search for the best plan of a problem. All step times are in seconds per minibatch."""

    problem: Problem
    cuts: Cuts
    deadline: float | None = None
    """Time at which the search stops, by `time.perf_counter`; None for no limit."""
    gap: float = 0.0
    """Relative distance of the best plan from the bound at which the search may stop."""
    effort: SearchEffort = field(default_factory=SearchEffort)
    report: Callable[[float, float], None] = tell_nobody
    """A function that is called with the bound and the step time of the best plan as they change. The step time is
    infinite while there is no plan."""
    price: Callable[[Plan], float] | None = None
    """A function that gives the step time of a plan with contention, by the evaluator; or None."""
    useful_s: float = float("inf")
    """Plans with at least this step time are useless, in seconds per minibatch."""
    near: bool = False
    """Whether the step time of the best plan is probably close to `useful_s`."""


@dataclass(frozen=True)
class Region:
    """A part of the searched space: one space of plans, or one shape of a uniform grid."""

    space: PlanSpace
    shape: GridShape | None
    low_s: float
    """Lower bound on the step time of every plan of the region, in seconds per minibatch."""


@dataclass
class BestSoFar:
    """The best plan and the bound of all searches for one task so far."""

    task: SearchTask
    best: tuple[float, PlanSpace, FoundPipeline] | None = None
    bound: float = float("inf")
    finished: bool = True
    interrupted: bool = False
    regions: list[Region] = field(default_factory=list)
    """The regions searched so far, each with its own bound."""
    memory_binds: bool = False
    """Whether the best plan would be faster without the memory limit."""

    @property
    def step_time_s(self) -> float:
        """The step time of the best plan, in seconds per minibatch; infinite if there is none."""
        return self.best[0] if self.best else float("inf")

    @property
    def limit_s(self) -> float:
        """The step time that a plan has to beat, in seconds per minibatch."""
        return self.task.useful_s if self.best is None else min(self.task.useful_s, self.best[0] * (1 - PRECISION))

    def watch(self, space: PlanSpace, others_s: float) -> Callable[[float, float], None]:
        """The function that reports the search of one space; `others_s` is a lower bound on the spaces that remain to
        be searched."""
        problem = self.task.problem

        def report(low: float, high: float) -> None:
            best = min(space.step_time(problem, high), self.step_time_s)
            self.task.report(min(space.step_time(problem, low), self.bound, others_s), best)

        return report

    def excludes(self, bound_s: float) -> bool:
        """Whether a space of plans with step times of at least `bound_s` has no useful plan."""
        return bound_s >= self.task.useful_s or (self.best is not None and bound_s >= self.best[0])

    def stop(self, bound_s: float) -> None:
        """Record that Ctrl-C ended the search before a space of plans with step times of at least `bound_s`."""
        self.interrupted = True
        self.leave(bound_s)

    def leave(self, bound_s: float) -> None:
        """Record that there is no time for a space of plans with step times of at least `bound_s`."""
        self.finished, self.bound = False, min(self.bound, bound_s)

    def add(self, space: PlanSpace, result: BisectionResult[FoundPipeline], memory_binds: bool = False) -> None:
        """Add the result of one more search."""
        problem = self.task.problem
        if result.low < float("inf"):
            self.regions.append(Region(space, None, space.step_time(problem, result.low)))
        self.finished, self.interrupted = self.finished and result.finished, self.interrupted or result.interrupted
        if result.best is not None or not result.finished:
            self.bound = min(self.bound, space.step_time(problem, result.low))
        if result.best is None:
            return
        if self.best is None or space.step_time(problem, result.high) < self.best[0] * (1 - PRECISION):
            self.best = space.step_time(problem, result.high), space, result.best
            self.memory_binds = memory_binds


def least_step_time_alone_s(problem: Problem) -> float:
    """Lower bound on every plan's step time without contention: the time of all work on all usable workers."""
    return problem.work_s / problem.speed_in_use


def least_step_time_s(problem: Problem) -> float:
    """Lower bound on every plan's step time, which also counts cores that workers share."""
    return max(least_step_time_alone_s(problem), contention.least_step_time_of_shared_cores_s(problem))


def plan_of(problem: Problem, space: PlanSpace, stages: Sequence[Stage], step_time_s: float) -> Plan:
    """The plan of a pipeline of one space, with the depths that sustain a step time in seconds per minibatch."""
    # A depth may change exactly at this step time. The margin keeps rounding from adding a minibatch.
    return depths.assign_depths(space.plan(problem, stages), problem, step_time_s * (1 + 1e-12))


def alone_result(task: SearchTask, so_far: BestSoFar) -> Result:
    """The result of the searches without contention, with the proven bound."""
    cuts, finished, interrupted = task.cuts, so_far.finished, so_far.interrupted
    if so_far.best is None:
        proven, floor = finished and cuts.complete, least_step_time_alone_s(task.problem)
        status = Status.INFEASIBLE if proven else Status.TIME_LIMIT
        bound = so_far.bound if cuts.complete and so_far.bound < float("inf") else 0.0
        least = task.useful_s if proven else max(floor, bound)
        return Result("DP", status, None, float("inf"), least, 0.0, _note(cuts, finished), interrupted=interrupted)
    step_time, space, pipeline = so_far.best
    plan = plan_of(task.problem, space, pipeline.stages(), step_time)
    return found_result(task, BisectionResult(so_far.bound, step_time, plan, finished, interrupted))


def found_result(task: SearchTask, interval: BisectionResult[Plan]) -> Result:
    """The result of searches that found a plan."""
    plan, step_time, cuts = interval.best, interval.high, task.cuts
    assert plan is not None
    if interval.finished and cuts.complete and interval.low >= step_time * (1 - 4 * PRECISION):
        return Result("DP", Status.OPTIMAL, plan, step_time, step_time, 0.0)
    floor = least_step_time_alone_s(task.problem)
    bound = min(max(interval.low if cuts.complete else floor, floor), step_time)
    note = _note(cuts, interval.finished)
    return Result("DP", Status.FEASIBLE, plan, step_time, bound, 0.0, note, interrupted=interval.interrupted)


def _note(cuts: Cuts, finished: bool) -> str:
    if not cuts.complete:
        return f"the search covered {len(cuts.ideals)} of the graph's cuts, not all of them"
    return "the requested gap was reached" if finished else "the search ended before it could prove this plan optimal"
