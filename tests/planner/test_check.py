"""`pipeplan check` against plans and certificates that hold, that are forged, and that were tampered with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from brute_force import Instance
from certificates import certificate
from instances import drawn, random_instance

from pipeplan import render
from pipeplan.check.verify import Finding, verify
from pipeplan.errors import InfeasibleError
from pipeplan.files import Node
from pipeplan.problem import Problem
from pipeplan.solve import Settings, solve

Document = dict[str, Any]


def _document(problem: Problem) -> Document:
    """plan.json of the best plan."""
    document = render.plan_document(solve(problem, Settings(solver="dp")))
    # As it is read from a file.
    document["options"] |= {
        key: [list(item) if isinstance(item, tuple) else item for item in value] if isinstance(value, tuple) else value
        for key, value in asdict(problem.options).items()
    }
    return document


def _checked(document: Document, problem: Problem) -> dict[str, Finding]:
    return {found.what: found for found in verify(Node(document, "plan.json"), problem.profile)}


def _certified(seed: int, draw: Callable[[int], Instance]) -> tuple[Instance, Problem, Document] | None:
    """A random problem and its best plan with a certificate; None where there is no plan."""
    instance, problem = drawn(seed, draw)
    try:
        document = _document(problem)
    except InfeasibleError:
        return None
    document["certificate"] = certificate(instance, document["prediction"]["minibatch_s"])
    return instance, problem, document


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_a_certificate_of_all_states_below_the_best_pace_holds(start: int) -> None:
    for seed in range(start, start + 20):
        made = _certified(seed, lambda seed: random_instance(seed, layers=5))
        if made is not None:
            found = _checked(made[2], made[1])
            assert all(finding.holds for finding in found.values()), (seed, found)
