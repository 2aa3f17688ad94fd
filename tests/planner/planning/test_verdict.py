"""A contradiction between the solvers is never passed over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from instances import random_instance, to_problem

from pipeplan.cluster_data import cluster_toml
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import DisagreementError
from pipeplan.planning import solve
from pipeplan.planning.outcome import contradiction
from pipeplan.planning.run_solvers import Disagreement
from pipeplan.planning.settings import Settings
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import load_profile
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.result import Result, Status


@pytest.fixture
def problem() -> Problem:
    return to_problem(random_instance(1, layers=5))


@pytest.fixture
def answers(problem: Problem) -> tuple[Result, Result]:
    first = dynamic_program.solve(problem, enumerate_cuts(problem, 1000))
    return first, integer_program.solve(problem, integer_program.IlpLimits(), first.objective_s)


def test_agreement_is_proof(problem: Problem, answers: tuple[Result, Result]) -> None:
    assert not contradiction(problem, answers)
    verdict = solve.solve(problem).verdict
    assert verdict.proven
    assert verdict.text.startswith("proven: no plan of the searched space is ")
    assert verdict.provers == ("DP", "ILP (HiGHS)")


def test_a_single_solver_proves_nothing_to_the_verdict(problem: Problem) -> None:
    verdict = solve.solve(problem, Settings(solver="dp")).verdict
    assert not verdict.proven
    assert verdict.text.startswith("not confirmed: no plan of the searched space is ")
    assert verdict.text.endswith("; DP shows the bound, and no second solver was asked")


def test_an_objective_that_is_not_the_plans_is_caught(problem: Problem, answers: tuple[Result, Result]) -> None:
    wrong = replace(answers[1], objective_s=answers[1].objective_s * 0.99, bound_s=answers[1].bound_s * 0.99)
    assert "claims" in contradiction(problem, [answers[0], wrong])


def test_a_bound_above_the_others_plan_is_caught(problem: Problem, answers: tuple[Result, Result]) -> None:
    wrong = replace(answers[1], bound_s=answers[1].bound_s * 1.01)
    assert "faster than the bound" in contradiction(problem, [answers[0], wrong])


def test_infeasible_against_a_plan_is_caught(problem: Problem, answers: tuple[Result, Result]) -> None:
    nothing = Result("ILP (HiGHS)", Status.INFEASIBLE, None, float("inf"), float("inf"), 0.0)
    assert "claims that there is no plan" in contradiction(problem, [answers[0], nothing])


def test_a_time_limit_is_no_contradiction(problem: Problem, answers: tuple[Result, Result]) -> None:
    assert not contradiction(
        problem, [answers[0], Result("ILP (HiGHS)", Status.TIME_LIMIT, None, float("inf"), 0.0, 60.0)]
    )


def test_a_bound_with_everything_charged_is_compared_with_a_plan_charged_alike() -> None:
    """A plan whose cards are shared is slower than its objective without sharing, which no charged bound speaks of."""
    problem = Problem(load_profile("gnmt8-v100"), cluster_toml.load_cluster("A"))
    alone = replace(problem, options=replace(problem.options, contention=False))
    plain = dynamic_program.solve(alone, enumerate_cuts(alone, 1000))
    assert plain.plan is not None
    score = evaluate(plain.plan, problem)
    assert score.step_time_s > score.alone_s * 1.1
    charged = replace(plain, solver="DP", objective_s=score.step_time_s, bound_s=score.step_time_s, charged=True)
    assert not contradiction(problem, [charged, replace(plain, solver="ILP (HiGHS)")])
    assert "faster than the bound" in contradiction(problem, [replace(charged, charged=False, plan=None), plain])


def test_a_disagreement_is_raised(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dynamic_program.solve

    def pessimist(*arguments: object, **named: object) -> Result:
        """A program that claims as its bound more than it found."""
        result = honest(*arguments, **named)  # type: ignore[arg-type]
        return replace(result, bound_s=result.bound_s * 2)

    monkeypatch.setattr(dynamic_program, "solve", pessimist)
    with pytest.raises(DisagreementError, match="the solvers disagree") as caught:
        solve.solve(problem)
    assert isinstance(caught.value, Disagreement)
