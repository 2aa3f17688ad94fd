"""Certificates that no plan is faster than a given pace, for anyone to check without the solvers.

A certificate lists the states of a search that finds no plan. docs/check.md describes its content and why it is a
proof; `pipeplan check` verifies it with code of its own. For every space of plans, one more search runs just below the
pace that the best plan would need there, over all cuts of the graph.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import OutOfTime, limits_of
from pipeplan.solvers.dp.stage_costs import CostTerms
from pipeplan.solvers.dp.uniform_search import UniformSearch
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces

TOLERANCE = 1e-9
"""Relative margin below the pace within which a faster plan is not excluded."""

# The checker goes over every state, cut and candidate placement. Beyond these limits that would take minutes.
MOST_CUTS = 2000
MOST_CELLS = 40_000
"""Limit on the number of cuts times workers."""
MOST_STATES = 20_000
PATIENCE_S = 20.0
"""Seconds that making a certificate may take."""


@dataclass(frozen=True)
class Certificate:
    """The content of plan.json under `certificate`, or a note that says why there is none."""

    document: dict[str, Any] | None
    note: str


def make_certificate(problem: Problem, cuts: Cuts, pace_s: float) -> Certificate:
    """The certificate that no plan of a problem is faster than `pace_s` as long as transfers share no network cards."""
    if reason := _unfit(problem, cuts):
        return Certificate(None, reason)
    entries: list[dict[str, Any]] = []
    deadline = time.perf_counter() + PATIENCE_S
    for space in plan_spaces(problem):
        floor = space.floor(problem)
        if floor >= pace_s:
            entries.append({"level": space.level, "copies": space.copies, "floor_s": floor})
            continue
        entry = _entry(problem, cuts, space, _inner(space, problem, space.synchronisation(problem), pace_s), deadline)
        if isinstance(entry, str):
            return Certificate(None, entry)
        entries.append(entry)
    if sum(len(entry.get("states", ())) for entry in entries) > MOST_STATES:
        return Certificate(None, f"the certificate would have more than {MOST_STATES} states")
    several = {"several": True} if problem.options.several else {}
    return Certificate({"tolerance": TOLERANCE, "bound_s": pace_s, **several, "spaces": entries}, "")


def _unfit(problem: Problem, cuts: Cuts) -> str:
    """The reason why no certificate can cover a problem, or an empty text."""
    options = problem.options
    if options.flushes:
        return "the parts of a batch add up over stages, which certificates do not cover"
    if problem.training and options.schedule == "vertical-sync" and options.memory:
        return "under vertical sync the memory of every stage depends on the first, which certificates do not cover"
    if not problem.cluster.uniform:
        return "certificates cover clusters of equal servers only"
    if options.boundary != "single":
        return "certificates cover single links between stages only"
    if options.grid:
        return "uniform grids are searched shape by shape, which certificates do not cover"
    if options.pins:
        return "pinned layers require a search for each number of stages, which certificates do not cover"
    if not cuts.complete or len(cuts.ideals) > MOST_CUTS:
        return f"the graph has more than {MOST_CUTS} cuts"
    if len(cuts.ideals) * problem.cluster.workers > MOST_CELLS:
        size = f"{len(cuts.ideals)} cuts on {problem.cluster.workers} workers"
        return f"a certificate with {size} would take too long to check"
    return ""


def _inner(space: PlanSpace, problem: Problem, synchronisation_s: float, pace_s: float) -> float:
    """The pace of one copy for which all copies together reach `pace_s`: the inverse of `PlanSpace.pace`."""
    exposed = 1.0 - problem.options.overlap
    inner = pace_s - exposed * synchronisation_s
    if inner < synchronisation_s and exposed > 0:
        inner = (pace_s - synchronisation_s) / exposed
    return inner * space.copies


def _entry(problem: Problem, cuts: Cuts, space: PlanSpace, threshold_s: float, deadline: float) -> dict[str, Any] | str:
    """The certificate's entry for one space of plans, or a text that says why there is none."""
    for memory in (False, True) if problem.options.memory else (False,):
        # Without the memory limit there are far fewer states, and a proof without it holds with it as well.
        inner = space.inner(problem)
        if not memory:
            inner = replace(inner, options=replace(inner.options, memory=False))
        limits = replace(limits_of(inner, memory=memory, deadline=deadline), every_cut=True)
        search = UniformSearch(CostTerms(inner, cuts), threshold_s * (1 - TOLERANCE), limits)
        try:
            pipeline = search.run()
        except OutOfTime:
            return f"the certificate would take longer than {PATIENCE_S:.0f} s to make"
        if pipeline is None:
            return {
                "level": space.level,
                "copies": space.copies,
                "threshold_s": threshold_s,
                "cuts": [f"{cut:x}" for cut in _layers(problem, cuts, search)],
                "states": _states(search),
            }
    return "the search that was to prove it found a faster plan"


def _layers(problem: Problem, cuts: Cuts, search: UniformSearch) -> list[int]:
    """The cuts that have states, as bit sets of layers in the profile's order."""
    position = {layer.name: index for index, layer in enumerate(problem.profile.layers)}
    masks = [sum(1 << position[name] for name in unit.layers) for unit in problem.units]
    masks_of_cuts = []
    for cut in sorted(search.kept):
        ideal = cuts.ideals[cut]
        masks_of_cuts.append(sum(mask for unit, mask in enumerate(masks) if ideal >> unit & 1))
    return masks_of_cuts


def _states(search: UniformSearch) -> list[list[float | int]]:
    """The rows of a search's states, in the form of the certificate."""
    rows: list[list[float | int]] = []
    counting = search.limits.counting
    for index, cut in enumerate(sorted(search.kept)):
        states = search.kept[cut]
        columns: list[list[float | int]] = [
            [index] * len(states),
            states.first.tolist(),
            states.level.tolist(),
            states.demand.tolist(),
        ]
        if counting.stages or counting.exact_stages or counting.workers:
            columns.append(states.stages.tolist())
        if counting.workers:
            columns.append(states.workers.tolist())
        rows += [list(row) for row in zip(*columns, strict=True)]
    return rows
