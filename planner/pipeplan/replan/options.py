"""The options of an old plan that `--relax` drops, and those of them that would make room for a new plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from pipeplan.cuts import enumerate_cuts
from pipeplan.posing import FLAGS
from pipeplan.problem import Options, Problem
from pipeplan.solvers import dp

_RELAXABLE = {
    "stages": "stages",
    "max-stages": "max_stages",
    "max-replicas": "max_replicas",
    "straight": "straight",
    "max-workers": "max_workers",
    "pin": "pins",
    "together": "together",
    "no-cut-after": "no_cut_after",
    "grid": "grid",
    "no-recompute": "no_recompute",
}
"""By option of `pipeplan solve`, its name in Python."""
RELAXED: dict[str, dict[str, Any]] = {
    option: {field: getattr(Options(), field) for field in FLAGS.get(name, (name,))}
    for option, name in _RELAXABLE.items()
}
"""By option of `pipeplan solve`, the fields of `Options` that it sets, with their defaults."""
_MOST_CUTS = 2000
"""Beyond this number only the cuts of one order of the layers are enumerated, as in `solve`."""


def relaxed(options: Options, names: Iterable[str]) -> Options:
    """The options without the constraints of the options of `RELAXED` that are named."""
    changes = {field: value for name in names for field, value in RELAXED[name].items()}
    return replace(options, **changes)


def what_helps(problem: Problem) -> list[str]:
    """Options of `pipeplan replan`, each of which alone makes the infeasible problem feasible."""
    found = [
        f"--relax {name}" for name in RELAXED if _changes(problem.options, name) and _fits(_without(problem, name))
    ]
    if problem.profile.dynamic_batch:
        found += [f"--minibatch {size}" for size in _first_that_fits(problem)]
    return found


def _changes(options: Options, name: str) -> bool:
    if name == "straight" and options.allow_copies:
        return False  # the constraint came from --max-replicas
    return relaxed(options, [name]) != options


def _without(problem: Problem, name: str) -> Problem:
    return replace(problem, options=relaxed(problem.options, [name]))


def _first_that_fits(problem: Problem) -> Iterator[int]:
    """The largest feasible size among the minibatch halved once, twice and so on; nothing if there is none."""
    size = problem.profile.minibatch // 2
    while size >= 1:
        if _fits(replace(problem, profile=problem.profile.rescaled(size))):
            yield size
            return
        size //= 2


def _fits(problem: Problem) -> bool:
    return bool(dp.feasible(problem, enumerate_cuts(problem, _MOST_CUTS)))
