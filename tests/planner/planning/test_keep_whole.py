"""Stages are within one server where that costs little, and idle workers come last."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

import pipeplan
from pipeplan.checker.verify import check_plan
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.keep_whole import kept_whole
from pipeplan.planning.settings import Settings
from pipeplan.planning.simplest import WITHIN
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.rendering.plan_json import plan_document
from pipeplan.util.files import Node

PROFILE = pipeplan.read_profile("vgg16-v100")


def _problem(servers: int) -> Problem:
    return Problem(PROFILE, pipeplan.cluster("A", servers=servers), Options(schedule="1f1b-stashing"))


def _plan(problem: Problem, *workers: range) -> Plan:
    names, count = problem.layer_names, len(workers)
    edges = [index * len(names) // count for index in range(count + 1)]
    layers = [names[first:end] for first, end in itertools.pairwise(edges)]
    stages = tuple(Stage(tuple(mine), tuple(held), 1, 1) for mine, held in zip(layers, workers, strict=True))
    return depths.assign_depths(Plan(stages), problem, 0.1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((range(5, 6), range(6, 7)), ((0,), (1,))),
        ((range(2, 4),), ((0, 1),)),
        ((range(3), range(3, 6)), ((0, 1, 2), (4, 5, 6))),
        ((range(4), range(4, 8)), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ((range(3), range(3, 8)), ((0, 1, 2), (3, 4, 5, 6, 7))),
    ],
    ids=["idle first", "data parallelism", "straddling", "whole already", "no room to skip"],
)
def test_stages_move_to_where_servers_are_whole(before: tuple[range, ...], after: tuple[tuple[int, ...], ...]) -> None:
    problem = _problem(2)
    plan = _plan(problem, *before)
    moved, score = kept_whole(plan, problem, float("inf"))
    assert tuple(stage.workers for stage in moved.stages) == after
    assert [stage.layers for stage in moved.stages] == [stage.layers for stage in plan.stages]
    assert score == evaluate(moved, problem)


def test_a_placement_that_is_slower_than_the_limit_is_left_alone() -> None:
    problem = _problem(2)
    plan = _plan(problem, range(3), range(3, 6))
    moved, score = kept_whole(plan, problem, float("inf"))
    assert moved != plan
    assert kept_whole(plan, problem, score.pace_s * 0.999)[0] == plan


def test_solve_leaves_the_last_workers_idle() -> None:
    """A profile that is planned on eight workers, of which it may use two, one for each stage."""
    options: dict[str, Any] = {"stages": 2, "max_replicas": 1, "schedule": "1f1b-stashing"}
    settings = Settings(solver="dp", simplest=WITHIN, simulate=False, time_limit_s=None)
    profile = pipeplan.read_profile("alexnet-v100")
    outcome = pipeplan.solve(profile, pipeplan.cluster("A", servers=2), settings=settings, **options)
    assert sorted(worker for stage in outcome.plan.stages for worker in stage.workers) == [0, 1]
    assert outcome.simplification is None
    document = json.loads(json.dumps(plan_document(outcome)))
    assert all(result.holds is not False for result in check_plan(Node(document, "plan.json"), profile).results)


def test_copies_stay_where_they_are() -> None:
    problem = _problem(2)
    stage = Stage(tuple(problem.layer_names), (4, 0), 1, 1)
    plan = replace(Plan((stage,)), copies=2)
    assert kept_whole(plan, problem, float("inf"))[0] is plan
