"""`pipeplan check` accepts baselines that were not searched for to the end, and no unknown reason for missing ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from long_chains import long_chain

from pipeplan.checker.verify import check_plan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.planning import baselines, settings, solve
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.virtual_stages import solve_virtual
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.rendering import plan_json
from pipeplan.solvers.dp.budget import OutOfTime
from pipeplan.util.files import Node

NAMES = (baselines.UNIFORM_GRID, baselines.STRAIGHT, baselines.UNPIPELINED)


def _problem(options: Options) -> Problem:
    levels = (Level("server", 2, 1e10), Level("cluster", 2, 1e9))
    return Problem(long_chain(6), Cluster("small", Device("chip", "cuda", 16 * 2**30), levels), options)


def _solved(problem: Problem) -> Outcome:
    return solve.solve(problem, Settings(solver="dp", compare=True))


def _document(outcome: Outcome) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(plan_json.plan_document(outcome)))
    return read


def _wrong(document: dict[str, Any], problem: Problem) -> list[str]:
    """The checks of plan.json that fail."""
    return [one.line for one in check_plan(Node(document, "plan.json"), problem.profile).results if one.holds is False]


def _remarks(outcome: Outcome) -> dict[str, str]:
    return {one.name: one.remark for one in outcome.baselines if one.pace_s is None}


def test_baselines_for_which_there_was_no_time_are_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem(Options(recompute=False))
    for phase in ("grid", "baselines"):
        monkeypatch.setitem(settings.SHARES, phase, 0.0)
    outcome = _solved(problem)
    assert _remarks(outcome) == dict.fromkeys(NAMES, baselines.NO_TIME)
    assert not _wrong(_document(outcome), problem)


def test_baselines_before_which_ctrl_c_came_are_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem(Options(recompute=False))

    def stopped(*arguments: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(baselines, "straight_pipelines", stopped)
    outcome = _solved(problem)
    assert _remarks(outcome) == dict.fromkeys(NAMES[1:], baselines.STOPPED)
    assert not _wrong(_document(outcome), problem)


def test_a_straight_pipeline_that_is_the_best_found_in_time_is_no_defect() -> None:
    problem = _problem(Options(recompute=False))
    outcome = _solved(problem)
    named = [
        replace(one, remark=baselines.IN_TIME) if one.name == baselines.STRAIGHT else one for one in outcome.baselines
    ]
    assert not _wrong(_document(replace(outcome, baselines=tuple(named))), problem)


def test_baselines_of_interleaved_plans_for_which_there_was_no_time_are_no_defect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = _problem(Options(recompute=False, schedule="interleaved-1f1b", accumulate=8))

    def late(*arguments: object) -> object:
        raise OutOfTime

    monkeypatch.setattr(solve_virtual, "enumerate_cuts", late)
    outcome = _solved(problem)
    remarks = dict.fromkeys((baselines.UNIFORM_GRID, solve_virtual.BEST_FLUSH), baselines.NO_TIME)
    assert _remarks(outcome) == remarks
    assert not _wrong(_document(outcome), problem)


@pytest.mark.parametrize("name", [baselines.PARALLEL, *NAMES])
def test_another_reason_for_a_missing_baseline_is_refused(name: str) -> None:
    problem = _problem(Options(recompute=False))
    document = _document(_solved(problem))
    (entry,) = (one for one in document["baselines"] if one["name"] == name)
    entry.update(minibatch_s=None, gain=None, config="", remark="it rained", plan=None)
    assert any("baselines" in text for text in _wrong(document, problem))
