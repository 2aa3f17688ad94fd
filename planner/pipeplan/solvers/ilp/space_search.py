"""Searches one space of plans: raises the lower bound, solves a program, and repeats with depths or a lower limit.

The first program has no depths. Later programs have the depths for their limit, not for the step time of their
solution. So the optimum of a program is a lower bound on the step time. A plan that attains the bound and satisfies all
constraints is optimal. Otherwise the next program has depths, and later programs have lower limits.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field

from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp import backend
from pipeplan.solvers.ilp.backend import MilpOutcome
from pipeplan.solvers.ilp.columns import ColumnFactory, Columns
from pipeplan.solvers.ilp.cut_table import CutTable
from pipeplan.solvers.ilp.enumeration import ColumnEnumeration, TooManyColumnsError, without_twins
from pipeplan.solvers.ilp.places import Places
from pipeplan.solvers.ilp.program import ColumnProgram, ProgramLimits
from pipeplan.solvers.plan_space import PlanSpace
from pipeplan.util.deadline import Deadline

CUTOFF_SLACK = 1e-6
"""Relative margin above another solver's objective within which the program still searches. If that objective is too
low, the program has no solution; if it is too high, the program finds a better plan."""
PRECISION = 1e-8
"""Relative tolerance: a plan is optimal if no plan is faster by more than this."""
# Relative margin on the step time that determines depths, so that rounding does not add a minibatch.
_DEPTH_ROUNDING = 1e-12
# Relative distance of the next limit below the step time of the best plan, larger than the solver's tolerances.
_TELLING = 1e-7
# Share of the remaining time for one program. If the program needs more time, the search only raises lower bounds.
_SEARCHING = 0.75
# Fewest remaining seconds for which a program is begun.
_LEAST_S = 0.5
# Step times, as shares of the upper bound, that the search tries to rule out in the remaining time.
_REFUTED = (0.8, 0.9, 0.95, 0.98, 0.99)
# Relative distance of the first limit above the lower bound. It doubles until some columns make a pipeline.
_FIRST_STEP = 0.002
# If another solver's objective is the limit: relative distances below it at which columns are enumerated, in turn.
_BELOW = (0.001, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95)
# Relative distance of the bounds at which the enumeration stops and the program begins.
_NARROW = 2e-7


@dataclass(frozen=True)
class IlpLimits:
    """When the solver of the integer program stops."""

    seconds: float | None = None
    """Time limit in seconds; None for no limit."""
    gap: float = 0.0
    """Relative gap at which the solver may stop."""


@dataclass
class SpaceAnswer:
    """The result of the search of one space. Step times are in seconds per minibatch of all copies."""

    bound_s: float
    """Lower bound on the step time of every plan in the space; infinite if no plan is below the upper bound."""
    proven: bool = False
    """Whether no plan in the space is faster than `best`, or than the upper bound."""
    interrupted: bool = False
    refusal: str = ""
    """The reason why the space was not searched to the end; else empty."""
    best: tuple[float, Plan] | None = None
    """The fastest plan that fits, with its step time by the evaluator, including contention."""
    size: tuple[int, int] = (0, 0)
    """(variables, constraints) of the largest program."""


@dataclass
class SpaceSearch:
    """The search of one space for a plan whose step time is at most `high_s`.

    T is the time of a minibatch in one copy, or, with a flush, of an update. The step time is that of all copies
    together.
    """

    problem: Problem
    space: PlanSpace
    cuts: CutTable
    shape: GridShape | None
    low_s: float
    """Lower bound on the step time of all copies, in seconds per minibatch."""
    high_s: float
    limits: IlpLimits
    deadline: Deadline
    is_bounded: bool
    """Whether the upper bound is another solver's objective, and therefore near the best step time."""
    answer: SpaceAnswer = field(init=False)
    _low_time_s: float = 0.0
    """Lower bound on T."""
    _is_narrowed: bool = False
    _deep: bool = False
    """Whether programs have depths."""
    _known: list[tuple[float, Columns]] = field(default_factory=list)
    """Columns that were enumerated, by their limit on the step time."""

    def __post_init__(self) -> None:
        self.answer = SpaceAnswer(self.low_s)
        inner = self.space.inner(self.problem)
        self.places = Places(inner, self.shape)
        self.factory = ColumnFactory(self.problem, self.space, self.cuts, self.places)
        self.enumeration = ColumnEnumeration(self.factory, self.deadline)

    def run(self) -> None:
        """Search the space, and put the result into `answer`.

        Raises `OutOfTime`; `answer` then has the result so far.
        """
        self.narrow()
        try:
            if not self.answer.refusal:
                self._search()
        except TooManyColumnsError as error:
            self._refuse(error)

    def _refuse(self, error: TooManyColumnsError) -> None:
        self.answer.refusal = f"the integer program would be too large: {error}"

    # -- limits --

    def _time_s(self, step_time_s: float) -> float | None:
        """The largest T at which all copies together reach a step time."""
        return self.space.inner_step_time(self.problem, step_time_s)

    def _columns(self, step_time_s: float) -> Columns | None:
        """The columns of plans with at most this step time; None if there is no such plan."""
        time_s = self._time_s(step_time_s)
        if time_s is None or time_s <= 0:
            return None
        among = next((columns for known_s, columns in self._known if known_s >= step_time_s), None)
        columns = self.enumeration.within(time_s, step_time_s, among)
        if not len(columns):
            return None
        # Keep the columns of the smallest and of the largest limit.
        self._known = sorted([*self._known[-1:], (step_time_s, columns)], key=lambda known: known[0])
        return columns

    def _is_possible(self, step_time_s: float) -> bool:
        """Whether columns make a pipeline within a step time. If no columns do, the step time is a lower bound."""
        if self._columns(step_time_s) is not None:
            return True
        self._raise_low(step_time_s)
        return False

    def _raise_low(self, step_time_s: float) -> None:
        self.low_s = self.answer.bound_s = max(self.low_s, step_time_s)
        self._low_time_s = max(self._low_time_s, self._time_s(step_time_s) or 0.0)

    def narrow(self) -> None:
        """Raise the lower bound as far as enumeration alone can, unless that has been done."""
        if self._is_narrowed:
            return
        self._is_narrowed = True
        try:
            if self.is_bounded:
                with suppress(TooManyColumnsError):
                    self._narrow_from_above()
                    return
            self._narrow_from_below()
        except TooManyColumnsError as error:
            self._refuse(error)

    def _narrow_from_above(self) -> None:
        """Narrow below another solver's objective."""
        high = self.high_s
        for share in (0.0, *_BELOW):
            step_time_s = self.high_s * (1 - share)
            if step_time_s <= self.low_s or not self._is_possible(step_time_s):
                break
            high = step_time_s
        while self.low_s < high * (1 - _NARROW):
            step_time_s = math.sqrt(self.low_s * high)
            if self._is_possible(step_time_s):
                high = step_time_s

    def _narrow_from_below(self) -> None:
        """Narrow in growing steps from the lower bound, because there are far more columns near the upper bound."""
        step = _FIRST_STEP
        while self.low_s < self.high_s:
            step_time_s = min(self.low_s * (1 + step), self.high_s)
            if self._is_possible(step_time_s):
                if step <= _FIRST_STEP:
                    return
                step /= 4
            elif step_time_s >= self.high_s:
                return
            else:
                step *= 2

    # -- programs --

    def _search(self) -> None:
        """Solve programs until one shows that there is no plan, or that the best one found is optimal."""
        step, limit_s = _FIRST_STEP, self.high_s
        while not self.answer.proven and self.low_s < self.high_s:
            if not self.is_bounded:
                limit_s = min(self.high_s, self.low_s * (1 + step))
            program, outcome = self._solve_once(limit_s)
            self.answer.interrupted, self.answer.refusal = outcome.interrupted, outcome.failure
            if program is not None:
                self.low_s = max(self.low_s, min(limit_s, outcome.bound * limit_s))
                self.answer.bound_s = self.low_s
            if program is not None and outcome.found:
                if not self._settle(program, limit_s, proven=outcome.proven):
                    return
            elif not outcome.proven:
                self._refute()
                return
            else:
                self._raise_low(limit_s)
                step *= 2
            limit_s = self.high_s
        self.answer.proven = True
        if self.low_s >= self.high_s and self.answer.best is None:
            self.answer.bound_s = math.inf

    def _refute(self) -> None:
        """Raise the lower bound in the remaining time, if this time is too short for a proof.

        Programs with a lower limit have fewer columns, and may show that no plan is below that limit."""
        for share in _REFUTED if self.is_bounded and self.deadline.at is not None else ():
            limit_s = share * self.high_s
            if self.low_s < limit_s and not self.answer.interrupted and (self.deadline.left_s or 0) > _LEAST_S:
                _, outcome = self._solve_once(limit_s, share=1.0)
                if outcome.found or not outcome.proven:
                    return
                self._raise_low(limit_s)

    def _solve_once(self, limit_s: float, share: float = _SEARCHING) -> tuple[ColumnProgram | None, MilpOutcome]:
        """Build the program of a limit and run the solver on it. There is no program if no columns make a pipeline."""
        columns, time_s = self._columns(limit_s), self._time_s(limit_s)
        if columns is None or time_s is None:
            return None, MilpOutcome(found=False, proven=True, bound=math.inf)
        limits = ProgramLimits(min(self._low_time_s, time_s), time_s, min(self.low_s, limit_s), limit_s)
        chosen = self.enumeration.with_depths(columns, time_s) if self._deep else without_twins(columns)
        program = ColumnProgram(self.factory, chosen, limits, self.deadline, deep=self._deep)
        self.answer.size = max(self.answer.size, program.program.size)
        left_s, settings = self.deadline.left_s, self.limits
        left_s = None if left_s is None else max(0.1, share * left_s)
        return program, backend.run(program.program.lp, left_s, settings.gap)

    def _settle(self, program: ColumnProgram, limit_s: float, *, proven: bool) -> bool:
        """Evaluate the solution of a program with this limit. Returns whether another program must follow.

        `proven` says whether the solution is optimal.
        """
        score = self._take(program.stages(), limit_s)
        value_s, gap = program.step_time_s(), self.limits.gap
        if score.fits and score.step_time_s <= value_s * (1 + PRECISION):
            self.answer.proven = proven and score.step_time_s * (1 - gap) <= self.low_s * (1 + PRECISION)
            return False
        if not proven:
            return False
        if not self._deep:
            self._deep = True
            return True
        if not score.fits or not score.step_time_s <= limit_s * (1 + PRECISION):
            self.answer.refusal = "its plan violates its own constraints"
            return False
        # The depths at this step time may be too small for a faster plan.
        self.is_bounded = True
        self.high_s = min(score.step_time_s, limit_s) * (1 - _TELLING)
        return True

    def _take(self, stages: list[Stage], limit_s: float) -> Evaluation:
        """The score of a plan with these stages. The plan is kept if it is the best one so far.

        The plan's depths are the smallest for its own step time, or, if these do not fit, for the limit.
        """
        plan = self.space.plan(self.problem, stages)
        deepest = self._with_depths(plan, limit_s)
        score = evaluate(deepest, self.problem)
        if score.batch is None:
            own_s = max(max(stage.stage_s, stage.boundary_s) for stage in score.stages)
            quick = self._with_depths(plan, self.space.step_time(self.problem, own_s))
            quick_score = evaluate(quick, self.problem)
            if quick_score.fits and (not score.fits or quick_score.step_time_s <= score.step_time_s):
                deepest, score = quick, quick_score
        if (
            score.fits
            and math.isfinite(score.step_time_s)
            and (self.answer.best is None or score.step_time_s < self.answer.best[0])
        ):
            self.answer.best = score.step_time_s, deepest
        return score

    def _with_depths(self, plan: Plan, step_time_s: float) -> Plan:
        """The plan with the smallest depths at which all copies sustain a step time."""
        time_s = self._time_s(step_time_s) or step_time_s * plan.copies
        return depths.assign_depths(plan, self.problem, time_s / plan.copies * (1 + _DEPTH_ROUNDING))
