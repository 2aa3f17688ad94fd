"""plan.json as `solve` writes it, and what `pipeplan check` finds of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipeplan.checker.verify import CheckResult, check_plan
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.plan_json import plan_document
from pipeplan.util.files import Node

Document = dict[str, Any]
QUICK = Settings(solver="dp", simulate=False, compare=False)


def written(outcome: Outcome) -> Document:
    """The plan.json of an outcome, as it is read from a file."""
    read: Document = json.loads(json.dumps(plan_document(outcome)))
    return read


def solved(problems: Iterable[Problem], settings: Settings = QUICK) -> Iterator[tuple[Problem, Outcome]]:
    """The outcomes of those problems that have one."""
    for problem in problems:
        try:
            yield problem, solve(problem, settings)
        except (InfeasibleError, InputError):
            continue


def findings(document: Document, profile: Profile) -> dict[str, CheckResult]:
    """All checks by name; only `document` if plan.json cannot be read."""
    try:
        results = check_plan(Node(document, "plan.json"), profile).results
    except InputError as error:
        results = (CheckResult("document", False, str(error)),)
    return {found.what: found for found in results}


def fault(document: Document, profile: Profile) -> str:
    """The first check that fails, as a line; empty if none does."""
    wrong = [found for found in findings(document, profile).values() if found.holds is False]
    return wrong[0].line if wrong else ""


def changed(document: Document, change: Callable[[Document], object]) -> Document:
    """A copy of a document with a change."""
    copied = copy.deepcopy(document)
    change(copied)
    return copied


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in a document."""
    keys: Any = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from places(node[key])
