"""Which of the options of an old plan a user can leave out, and which of them would make room for a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from pipeplan.cuts import enumerate_cuts
from pipeplan.problem import Options, Problem
from pipeplan.solvers import dp

RELAXED: dict[str, dict[str, Any]] = {
    "stages": {"stages": None},
    "max-stages": {"max_stages": None},
    "max-replicas": {"max_replicas": None},
    "straight": {"max_replicas": None, "allow_copies": True},
    "max-workers": {"max_workers": None},
    "pin": {"pins": ()},
    "together": {"together": ()},
    "no-cut-after": {"no_cut_after": ()},
    "grid": {"grid": False},
    "no-recompute": {"recompute": True},
}
"""By the option of `solve` that asks for it: the fields of `Options` as they are where nobody asks."""
_MOST_CUTS = 2000
"""Beyond these, the cuts of one order of the layers, as `solve` takes them."""


def relaxed(options: Options, names: Iterable[str]) -> Options:
    """The options without what the names in `RELAXED` ask for."""
    changes = {field: value for name in names for field, value in RELAXED[name].items()}
    return replace(options, **changes)


def what_helps(problem: Problem) -> list[str]:
    """Options of `pipeplan replan` that, any one of them given, make room for a plan where there is none."""
    found = [
        f"--relax {name}" for name in RELAXED if _changes(problem.options, name) and _fits(_without(problem, name))
    ]
    if problem.profile.dynamic_batch:
        found += [f"--minibatch {size}" for size in _first_that_fits(problem)]
    return found


def _changes(options: Options, name: str) -> bool:
    if name == "straight" and options.allow_copies:
        return False  # then it was --max-replicas that was asked for
    return relaxed(options, [name]) != options


def _without(problem: Problem, name: str) -> Problem:
    return replace(problem, options=relaxed(problem.options, [name]))


def _first_that_fits(problem: Problem) -> Iterator[int]:
    """The largest of the halves of the minibatch, quarters and on, with which there is a plan."""
    size = problem.profile.minibatch // 2
    while size >= 1:
        if _fits(replace(problem, profile=problem.profile.rescaled(size))):
            yield size
            return
        size //= 2


def _fits(problem: Problem) -> bool:
    return bool(dp.feasible(problem, enumerate_cuts(problem, _MOST_CUTS)))
