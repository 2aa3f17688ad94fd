"""`pipeplan check` of plans whose replicas divide the optimiser's state: honest files hold, and changed ones do not."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
from extents import first_few
from instances import divided_instance, drawn

from pipeplan.checker.verify import CheckedPlan, check_readable_plan
from pipeplan.errors import InfeasibleError
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.rendering import plan_json
from pipeplan.util.files import Node

Document = dict[str, Any]


@cache
def honest(seed: int) -> tuple[Problem, Document] | None:
    """A problem and the file of its best plan; None where none fits."""
    _, problem = drawn(seed, lambda number: divided_instance(number, layers=5))
    try:
        outcome = solve(problem, Settings(solver="dp", simulate=False))
    except InfeasibleError:
        return None
    return problem, json.loads(json.dumps(plan_json.plan_document(outcome)))


def checked(problem: Problem, document: Document) -> CheckedPlan:
    return check_readable_plan(Node(document, "plan.json"), problem.profile)


@pytest.mark.parametrize("seeds", first_few(range(400), 8))
def test_the_planners_figures_hold(seeds: range) -> None:
    found = [case for seed in seeds if (case := honest(seed)) is not None]
    assert len(found) > len(seeds) / 3
    for problem, document in found:
        assert checked(problem, document).wrong is None
        assert document["certificate"] is None
    replicated = [any(len(stage["workers"]) > 1 for stage in document["plan"]["stages"]) for _, document in found]
    assert sum(replicated) > 1


def test_a_plan_that_leaves_out_its_option_is_wrong() -> None:
    refused = 0
    for seed in range(8):
        if (case := honest(seed)) is None or not any(
            len(stage["workers"]) > 1 and stage["layers"] for stage in case[1]["plan"]["stages"]
        ):
            continue
        problem, document = copy.deepcopy(case)
        del document["options"]["sharding"]
        wrong = checked(problem, document).wrong
        refused += wrong is not None
    assert refused > 1


def test_no_certificate_is_accepted() -> None:
    problem, document = copy.deepcopy(next(case for case in map(honest, range(8)) if case is not None))
    document["certificate"] = {}
    wrong = checked(problem, document).wrong
    assert wrong is not None
    assert "no certificate speaks of plans whose replicas divide" in wrong.text
