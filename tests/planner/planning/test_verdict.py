"""A contradiction between the solvers is never passed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from instances import crowded_instance, drawn, random_instance, to_problem

from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import DisagreementError
from pipeplan.planning import solve
from pipeplan.planning.verdict import judge_results
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.rendering.plan_folder import write_disagreement
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
    verdict = judge_results(problem, list(answers))
    assert verdict.agree
    assert verdict.proven
    assert "proven optimal" in verdict.text


def test_a_single_solver_proves_nothing_to_the_verdict(problem: Problem, answers: tuple[Result, Result]) -> None:
    assert not judge_results(problem, [answers[0]]).proven


def test_an_objective_that_is_not_the_plans_is_caught(problem: Problem, answers: tuple[Result, Result]) -> None:
    wrong = replace(answers[1], objective_s=answers[1].objective_s * 0.99, bound_s=answers[1].bound_s * 0.99)
    assert not judge_results(problem, [answers[0], wrong]).agree
    assert "claims" in judge_results(problem, [answers[0], wrong]).text


def test_a_bound_above_the_others_plan_is_caught(problem: Problem, answers: tuple[Result, Result]) -> None:
    wrong = replace(answers[1], bound_s=answers[1].bound_s * 1.01)
    assert "faster than the bound" in judge_results(problem, [answers[0], wrong]).text


def test_infeasible_against_a_plan_is_caught(problem: Problem, answers: tuple[Result, Result]) -> None:
    nothing = Result("ILP (HiGHS)", Status.INFEASIBLE, None, float("inf"), float("inf"), 0.0)
    assert not judge_results(problem, [answers[0], nothing]).agree


def test_a_time_limit_is_no_contradiction(problem: Problem, answers: tuple[Result, Result]) -> None:
    late = Result("ILP (HiGHS)", Status.TIME_LIMIT, None, float("inf"), 0.0, 60.0)
    verdict = judge_results(problem, [answers[0], late])
    assert verdict.agree
    assert not verdict.proven
    assert "did not confirm" in verdict.text


def test_an_objective_is_compared_with_the_pace_that_the_solver_minimised() -> None:
    """Contention slows the plan that is the best without it."""
    _, problem = drawn(2, lambda number: crowded_instance(number, layers=4))
    result = dynamic_program.solve(problem, enumerate_cuts(problem, 1000))
    assert result.plan is not None
    score = evaluate(result.plan, problem)
    assert score.pace_s > score.alone_s * 1.05
    for charged in (True, False):
        for pace_s in (score.pace_s, score.alone_s):
            claimed = replace(result, charged=charged, objective_s=pace_s, bound_s=0.0)
            assert judge_results(problem, [claimed]).agree == (charged == (pace_s == score.pace_s))


def test_a_bound_with_everything_charged_does_not_contradict_a_pace_without() -> None:
    _, problem = drawn(2, lambda number: crowded_instance(number, layers=4))
    alone = replace(dynamic_program.solve(problem, enumerate_cuts(problem, 1000)), charged=False)
    assert alone.plan is not None
    alone = replace(alone, objective_s=evaluate(alone.plan, problem).alone_s)
    charged = integer_program.solve(problem, integer_program.IlpLimits())
    assert charged.bound_s > alone.objective_s * 1.01
    verdict = judge_results(problem, [alone, charged])
    assert verdict.agree
    assert "ignores contention" in verdict.text
    wrong = replace(charged, bound_s=evaluate(alone.plan, problem).pace_s * 1.01)
    assert "faster than the bound" in judge_results(problem, [alone, wrong]).text


def test_a_disagreement_is_raised_and_both_plans_are_written(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = dynamic_program.solve

    def pessimist(*arguments: object) -> Result:
        """A program that claims as its bound more than it found."""
        result = honest(*arguments)  # type: ignore[arg-type]
        return replace(result, bound_s=result.bound_s * 2)

    monkeypatch.setattr(dynamic_program, "solve", pessimist)
    with pytest.raises(DisagreementError, match="the solvers disagree") as caught:
        solve.solve(problem)
    assert isinstance(caught.value, solve.Disagreement)
    written = write_disagreement(caught.value.results, tmp_path / "plan")
    assert sorted(path.name for path in written) == ["plan-disagreement-dp.json", "plan-disagreement-ilp.json"]
    assert all(path.exists() for path in written)
