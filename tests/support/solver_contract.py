"""What every solver must do: prove the optimum that brute force finds, or say that there is no plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import brute_force
import pytest
from brute_machines import Instance

from pipeplan.cost.evaluate import evaluate
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.result import Result, Status

MAXIMUM_CUTS = 10_000

IlpStart = Literal["cold", "bounded"]
"""Whether the ILP begins without a bound, or with the step time of the DP's plan as its cut-off."""


def solve_by_dp(problem: Problem) -> Result:
    """The answer of the dynamic program, without a limit on its time."""
    return dynamic_program.solve(problem, enumerate_cuts(problem, MAXIMUM_CUTS))


def solve_by_ilp(problem: Problem, cutoff_s: float | None = None) -> Result:
    """The answer of the integer program under its usual limits."""
    return integer_program.solve(problem, integer_program.IlpLimits(), cutoff_s=cutoff_s)


def assert_proves(result: Result, expected_s: float, problem: Problem) -> None:
    """The result is a proven plan of this step time, or a proof that there is none where the step time is infinite."""
    if math.isinf(expected_s):
        assert result.status == Status.INFEASIBLE, result.note
        assert result.plan is None
        return
    assert result.status == Status.OPTIMAL, result.note
    assert result.plan is not None
    assert result.objective_s == pytest.approx(expected_s, rel=1e-6)
    assert result.bound_s == pytest.approx(expected_s, rel=1e-6)
    score = evaluate(result.plan, problem)
    assert score.fits
    assert (score.step_time_s if result.charged else score.alone_s) == pytest.approx(expected_s, rel=1e-6)


def check_ilp(instance: Instance, problem: Problem, starts: Sequence[IlpStart]) -> None:
    """Hold the ILP from each of these starts to what brute force finds, with everything charged that the options ask
    for."""
    expected_s = brute_force.best(instance)
    cutoffs = {None if start == "cold" or math.isinf(expected_s) else expected_s for start in starts}
    for cutoff_s in cutoffs:
        result = solve_by_ilp(problem, cutoff_s)
        assert_proves(result, expected_s, problem)


def check_solvers(instance: Instance, problem: Problem, ilp: Sequence[IlpStart] = ()) -> list[Result]:
    """Hold the DP, and the ILP from each of these starts, to what brute force finds; returns their results."""
    expected_s = brute_force.best(instance)
    first = solve_by_dp(problem)
    assert_proves(first, expected_s, problem)
    results = [first]
    cutoffs = {None if start == "cold" or first.plan is None else first.objective_s for start in ilp}
    for cutoff_s in cutoffs:
        results.append(solve_by_ilp(problem, cutoff_s))
        assert_proves(results[-1], expected_s, problem)
    return results
