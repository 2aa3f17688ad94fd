"""What every solver must do: prove the optimum that brute force finds, or say that there is no plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import brute_force
import pytest
from brute_machines import Instance

from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import grid_shape_of
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.result import Result, Status

MAXIMUM_CUTS = 10_000

IlpStart = Literal["cold", "bounded"]
"""Whether the ILP begins without a bound, or with the best step time as its cut-off."""


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
    assert score.step_time_s == pytest.approx(expected_s, rel=1e-6)
    assert not problem.options.grid or grid_shape_of(result.plan, problem.cluster) is not None


def check_dp(instance: Instance, problem: Problem) -> float:
    """Hold the DP to what brute force finds, and return that step time."""
    expected_s = brute_force.best(instance)
    assert_proves(solve_by_dp(problem), expected_s, problem)
    return expected_s


def check_ilp(instance: Instance, problem: Problem, starts: Sequence[IlpStart]) -> float:
    """Hold the ILP from each of these starts to what brute force finds, and return that step time."""
    expected_s = brute_force.best(instance)
    for cutoff_s in {None if start == "cold" or math.isinf(expected_s) else expected_s for start in starts}:
        assert_proves(solve_by_ilp(problem, cutoff_s), expected_s, problem)
    return expected_s
