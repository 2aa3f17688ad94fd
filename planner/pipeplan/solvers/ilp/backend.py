"""Mixed-integer linear programs, stated through PuLP and solved by HiGHS.

This module knows nothing of pipelines. PuLP's wrapper does not report the proven bound, so it is read from the solver.

HiGHS runs inside this process, in a thread of its own, so that Ctrl-C reaches Python at once. HiGHS is then asked to
stop, and what it has found is read as after a time limit.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import pulp

from pipeplan.util.deadline import NO_DEADLINE, Deadline

# Feasibility tolerance, tighter than the solvers' default (1e-6) because the verdict compares objectives to 1e-6.
_TOLERANCE = 1e-9
# Seconds that HiGHS has to stop after Ctrl-C or its time limit, because some of its phases check neither.
_GRACE_S = 2.0
# Largest relative gap between an optimal objective and its bound that rounding can explain.
_TELLING = 1e-7
# Regular end states of HiGHS besides "Infeasible". Any other state is an error, such as a "Solve error".
_ENDS = ("Optimal", "Time limit reached", "Interrupted by user", "Interrupted by HiGHS")
# Seconds between two checks for Ctrl-C. The end of HiGHS is noticed at once.
_PATIENCE_S = 0.2


@dataclass(frozen=True)
class MilpOutcome:
    """The outcome of a run. The program's variables have the values of the solution."""

    found: bool
    """Whether the variables have the values of an integer solution."""
    proven: bool
    """Whether the solution is proven optimal within the requested gap, or infeasibility is proven."""
    bound: float
    """Lower bound on the objective of every solution; infinite for an infeasible program."""
    interrupted: bool = False
    """Whether the user stopped the run."""
    doubtful: bool = False
    """Whether the solver gave up, or reports an optimal solution that its own bound does not confirm."""
    failure: str = ""
    """The error if the solver gave up; else empty."""


def run(program: pulp.LpProblem, seconds: float | None, gap: float, *, confirm: bool = True) -> MilpOutcome:
    """Minimise a program, for at most `seconds` or to a relative `gap`; neither a time limit nor Ctrl-C is an error.

    The presolve of HiGHS 1.15 reports some feasible programs as infeasible. With `confirm`, HiGHS must find the same
    without presolve; otherwise the program is only likely to be infeasible. If presolve solves a program completely,
    HiGHS may return a solution worse than the optimum that it states, or report a solve error because the solution
    violates the program. `run` solves such programs again without presolve.
    """
    began = time.perf_counter()
    answer = _highs_once(program, seconds, gap, presolve="on")
    if not answer.interrupted and (answer.doubtful or (confirm and answer.proven and not answer.found)):
        left = None if seconds is None else max(0.1, seconds - (time.perf_counter() - began))
        return _highs_once(program, left, gap, presolve="off")
    return answer


@cache
def _swallow_banner() -> None:
    """Create the first model of HiGHS in this process while standard output is discarded.

    highspy 1.16 prints a banner when it creates the first model, before its output can be turned off. C's buffers are
    flushed before and after; otherwise the banner would be printed at exit.
    """
    import highspy

    first_model: Any = highspy.Highs
    empty_buffers = ctypes.CDLL(None).fflush
    empty_buffers(None)
    try:
        kept = os.dup(1)
    except OSError:  # standard output is closed, so nothing can be printed
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        first_model()
        empty_buffers(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _highs_once(program: pulp.LpProblem, seconds: float | None, gap: float, presolve: str) -> MilpOutcome:
    """Run HiGHS once, with `presolve` `on` or `off`."""
    _swallow_banner()
    solver: Any = pulp.getSolver(
        "HiGHS",
        msg=False,
        timeLimit=seconds,
        gapRel=gap,
        gapAbs=0.0,
        presolve=presolve,
        mip_feasibility_tolerance=_TOLERANCE,
        primal_feasibility_tolerance=_TOLERANCE,
    )
    waiting = _Interruptible(math.inf if seconds is None else seconds + _GRACE_S)
    solver.callSolver = lambda program: waiting.run(program.solverModel)
    try:
        # If the time ends before HiGHS has a solution, PuLP reads values that do not exist.
        with suppress(IndexError):
            program.solve(solver)
    except _AbandonedError:
        return MilpOutcome(found=False, proven=False, bound=0.0, interrupted=waiting.interrupted)
    model: Any = program.solverModel
    info, status = model.getInfo(), model.modelStatusToString(model.getModelStatus())
    if status == "Infeasible":
        if waiting.interrupted:
            return MilpOutcome(found=False, proven=False, bound=0.0, interrupted=True)
        return MilpOutcome(found=False, proven=True, bound=math.inf)
    if status not in _ENDS:
        return MilpOutcome(found=False, proven=False, bound=0.0, doubtful=True, failure=f"HiGHS ended with: {status}")
    has_solution = info.primal_solution_status == 2  # kSolutionStatusFeasible
    # Before HiGHS has solved the root node, its bound is minus infinity. No step time is negative.
    bound = max(0.0, float(info.mip_dual_bound))
    objective = float(info.objective_function_value)
    optimal = status == "Optimal"
    met = objective - bound <= max(gap, _TELLING) * max(1.0, abs(objective))
    return MilpOutcome(has_solution, optimal and met, bound, waiting.interrupted, doubtful=optimal and not met)


class _AbandonedError(Exception):
    """HiGHS did not stop when asked.

    HiGHS checks for interrupts and its limit during its search, but not in presolve.
    """


class _Interruptible:
    """Runs HiGHS in a thread until it ends, Ctrl-C stops it, or `most_s` seconds have passed."""

    def __init__(self, most_s: float) -> None:
        self.interrupted, self._most_s = False, most_s

    def run(self, model: Any) -> None:
        """Solve a model of highspy and wait for the end. Raises `_AbandonedError` if HiGHS does not stop when asked."""
        model.HandleUserInterrupt = True
        done = threading.Event()
        # Wait for an event: a thread whose `join` was interrupted counts as ended although it still runs.
        threading.Thread(target=_solve, args=(model, done), daemon=True).start()
        patience = self._most_s
        while not done.is_set():
            try:
                done.wait(_PATIENCE_S)
                patience -= _PATIENCE_S
            except KeyboardInterrupt:
                self.interrupted, patience = True, _GRACE_S
                model.cancelSolve()
            if patience < 0:
                raise _AbandonedError


def _solve(model: Any, done: threading.Event) -> None:
    """Run HiGHS in a thread and signal its end."""
    try:
        model.run()
    finally:
        done.set()


_OWNS_VARIABLES = hasattr(pulp.LpAffineExpression, "from_dict")
"""Whether programs own their variables, as they do from PuLP 4 on."""

Variable = pulp.LpVariable
Term = tuple[Variable, float]


class LinearProgram:
    """A program to be minimised. If terms contain a variable twice, its coefficients are added.

    Adding a constraint after the deadline raises `OutOfTime`, because large programs take a minute to build.
    """

    def __init__(self, deadline: Deadline = NO_DEADLINE) -> None:
        self.lp = pulp.LpProblem("pipeplan", pulp.LpMinimize)
        self._deadline = deadline
        self.one = self.number("one", 1.0, 1.0)
        """A variable that is always 1, for constant terms."""

    def minimise(self, terms: Iterable[Term]) -> None:
        """Set the objective."""
        self.lp.setObjective(_expression(terms))

    def number(self, name: str, low: float = 0.0, high: float | None = None) -> Variable:
        """A new continuous variable, at least `low`."""
        return new_variable(self.lp, name, low, high)

    def binary(self, name: str) -> Variable:
        """A new 0/1 variable."""
        return new_variable(self.lp, name, 0, 1, pulp.LpInteger)

    def at_most(self, terms: Iterable[Term], limit: float = 0.0) -> None:
        """Add Σ coefficient · variable ≤ limit."""
        self._add(_expression(terms) <= limit)

    def at_least(self, terms: Iterable[Term], limit: float = 0.0) -> None:
        """Add Σ coefficient · variable ≥ limit."""
        self._add(_expression(terms) >= limit)

    def equal(self, terms: Iterable[Term], value: float = 0.0) -> None:
        """Add Σ coefficient · variable = value."""
        self._add(_expression(terms) == value)

    def _add(self, constraint: Any) -> None:
        self._deadline.check()
        self.lp.addConstraint(constraint)

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of variables and of constraints."""
        return self.lp.numVariables(), self.lp.numConstraints()


def solution_value(variable: Variable) -> float:
    """The value of a variable in the solution. The program must have been solved."""
    value: float | None = variable.varValue
    assert value is not None, "the program has not been solved"
    return value


def new_variable(
    program: pulp.LpProblem, name: str, low: float | None = None, high: float | None = None, kind: str = "Continuous"
) -> Variable:
    """A new variable of a program, by the interface of the installed PuLP version."""
    if _OWNS_VARIABLES:
        return program.add_variable(name, low, high, kind)
    return pulp.LpVariable(name, low, high, kind)


def _expression(terms: Iterable[Term]) -> Any:
    merged, kind = _merged(terms), cast(Any, pulp.LpAffineExpression)
    return kind.from_dict(merged) if _OWNS_VARIABLES else kind(merged)


def _merged(terms: Iterable[Term]) -> dict[Variable, float]:
    merged: dict[Variable, float] = defaultdict(float)
    for variable, coefficient in terms:
        merged[variable] += coefficient
    return {variable: coefficient for variable, coefficient in merged.items() if coefficient}
