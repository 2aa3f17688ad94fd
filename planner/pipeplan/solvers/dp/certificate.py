"""Certificates that no plan is faster than a given step time, which can be checked without the solvers.

A certificate lists the states of a search that finds no plan. docs/proof.md describes its content, and why it is a
proof. `pipeplan check` verifies it with separate code. For every space of plans, one more search runs just below the
step time of the best plan, over all cuts of the graph and all candidate placements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeplan.plan.schedules import VERTICAL
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.grid_shapes import grid_shapes
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import OutOfTime, SearchLimits, limits_of
from pipeplan.solvers.dp.pipeline_searches import PipelineSearches
from pipeplan.solvers.dp.search.flush_search import PlacementFlushSearch
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.placement_search import PlacementSearch, SharedLimit
from pipeplan.solvers.dp.search.shared_resources import SharedResources
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces
from pipeplan.util.deadline import NO_DEADLINE, Deadline

TOLERANCE = 1e-9
"""Relative margin below the step time in which the certificate does not exclude a faster plan."""

# The checker visits every state, cut and candidate placement. Beyond these limits, a check would take minutes.
MOST_CUTS = 2000
MOST_CELLS = 40_000
"""Largest product of cuts and workers."""
MOST_STATES = 20_000
MOST_WORKERS = 256
"""Largest number of workers of a cluster that certificates cover."""
NO_TIME = "there was no time left to make a certificate; give more with --time-limit"
PATIENCE_S = 20.0
"""Time limit for making a certificate, in seconds."""


@dataclass(frozen=True)
class Certificate:
    """The content of plan.json under `certificate`, or a note that says why there is none."""

    document: dict[str, Any] | None
    note: str


def make_certificate(problem: Problem, cuts: Cuts, step_time_s: float, deadline: Deadline = NO_DEADLINE) -> Certificate:
    """The certificate that no plan of a problem is faster than `step_time_s`, in seconds per minibatch.

    Making the certificate takes at most `PATIENCE_S` seconds. If the deadline comes first, there is no certificate.
    """
    if reason := _unfit(problem, cuts):
        return Certificate(None, reason)
    entries: list[dict[str, Any]] = []
    ends = deadline.share(1.0, PATIENCE_S).at
    for space in plan_spaces(problem):
        floor_s = space.floor(problem)
        threshold_s = space.inner_step_time(problem, step_time_s)
        if threshold_s is None or floor_s >= step_time_s:
            entries.append({**_named(space), "floor_s": floor_s})
            continue
        proof = _SpaceProof(problem, cuts, space, threshold_s, ends)
        try:
            found = proof.entries()
        except OutOfTime:
            late = f"the certificate would take longer than {PATIENCE_S:.0f} s to make"
            return Certificate(None, NO_TIME if deadline.passed else late)
        if found is None:
            return Certificate(None, _unproven(problem))
        entries += found
    if sum(len(entry.get("states", ())) for entry in entries) > MOST_STATES:
        return Certificate(None, f"the certificate would have more than {MOST_STATES} states")
    return Certificate({"tolerance": TOLERANCE, "bound_s": step_time_s, "spaces": entries}, "")


def _unproven(problem: Problem) -> str:
    """The reason why a search may find a plan faster than the proven step time."""
    if problem.training and problem.options.schedule == VERTICAL and problem.options.memory:
        # The searches count one version of the weights; the checker counts at most one per minibatch in flight.
        return "under vertical sync the memory of every stage depends on the first, which certificates leave out"
    return "the search that was to prove it found a faster plan"


def _unfit(problem: Problem, cuts: Cuts) -> str:
    """The reason why no certificate can cover a problem, or an empty text."""
    if problem.options.shard_optimizer:
        return "no certificate covers plans whose replicas divide the optimiser's state"
    if any(space.unused for space in plan_spaces(problem)):
        return "certificates cover copies only where all servers of a copy have equal cards"
    if problem.cluster.workers > MOST_WORKERS:
        return f"a certificate covers at most {MOST_WORKERS} workers"
    if not cuts.complete or len(cuts.ideals) > MOST_CUTS:
        return f"the graph has more than {MOST_CUTS} cuts"
    if len(cuts.ideals) * problem.cluster.workers > MOST_CELLS:
        size = f"{len(cuts.ideals)} cuts on {problem.cluster.workers} workers"
        return f"a certificate with {size} would take too long to check"
    return ""


@dataclass(frozen=True)
class _SpaceProof:
    """The searches that prove that no pipeline of one space of plans stays within a threshold."""

    problem: Problem
    cuts: Cuts
    space: PlanSpace
    threshold_s: float
    """Seconds per minibatch of one copy, or, with a flush, seconds from one update to the next."""
    deadline: float | None

    def entries(self) -> list[dict[str, Any]] | None:
        """The certificate's entries, one for each part of the space; None if there is a faster plan."""
        for inner, limits in self._relaxed():
            resources = SharedResources(HeterogeneousTerms(inner, self.cuts), self.problem, self.space)
            found = [self._entry_of(resources, part) for part in self._parts(resources.terms, limits)]
            proven = [entry for entry in found if entry is not None]
            if len(proven) == len(found):
                return proven
        return None

    def _relaxed(self) -> Iterator[tuple[Problem, SearchLimits]]:
        """The problem of one copy without a memory limit, and then with the limit if there is one.

        Without the limit there are far fewer states, and a proof without the limit also holds with it.
        """
        inner = self.space.inner(self.problem)
        for memory in (False, True) if self.problem.options.memory else (False,):
            chosen = inner if memory else inner.without_memory_limit()
            yield chosen, replace(limits_of(chosen, memory=memory, deadline=self.deadline), every_cut=True)

    def _parts(self, terms: HeterogeneousTerms, limits: SearchLimits) -> list[SearchLimits]:
        """The limits of the searches that cover the space: one for each shape of a grid, or number of stages if layers
        are pinned."""
        if self.problem.options.grid:
            shapes, inner = grid_shapes(self.problem), terms.problem
            limited = (limits_of(inner, memory=limits.memory, deadline=self.deadline, shape=shape) for shape in shapes)
            return [replace(part, every_cut=True) for part in limited]
        counts = PipelineSearches(terms.problem, self.cuts).stage_counts(terms, limits)
        return [replace(limits, exact_stages=stages) for stages in counts]

    def _entry_of(self, resources: SharedResources, limits: SearchLimits) -> dict[str, Any] | None:
        """The entry of one part of the space; None if there is a faster plan."""
        search = self._search(resources, limits, self.threshold_s * (1 - TOLERANCE))
        if search.run() is not None:
            return None
        part = {"stages": limits.exact_stages} if limits.exact_stages != self.problem.options.stages else {}
        if limits.shape is not None:
            part = {"stages": limits.shape.stages, "replicas": limits.shape.replicas}
        # The states left at the empty cut have another number of stages than was asked for.
        search.kept.pop(0, None)
        return {
            **_named(self.space),
            **part,
            "threshold_s": self.threshold_s,
            "cuts": [f"{cut:x}" for cut in _layers(self.problem, self.cuts, search)],
            "states": _states(search),
        }

    def _search(self, resources: SharedResources, limits: SearchLimits, threshold: float) -> PlacementSearch:
        """The search for a pipeline within the threshold, including contention as the options say."""
        shared = None
        if self.problem.options.contention:
            shared = SharedLimit(resources, self.space.step_time(self.problem, threshold))
        kind = PlacementFlushSearch if self.problem.options.flushes else PlacementSearch
        return kind(resources.terms, threshold, limits, shared)


def _named(space: PlanSpace) -> dict[str, int]:
    """The fields of an entry that name its space of plans."""
    place = {"first": space.first} if space.first else {}
    return {"level": space.level, "copies": space.copies, **place}


def _layers(problem: Problem, cuts: Cuts, search: PlacementSearch) -> list[int]:
    """The cuts that have states, as bit sets of layers in the profile's order."""
    position = {layer.name: index for index, layer in enumerate(problem.profile.layers)}
    masks = [sum(1 << position[name] for name in unit.layers) for unit in problem.units]
    masks_of_cuts = []
    for cut in sorted(search.kept):
        ideal = cuts.ideals[cut]
        masks_of_cuts.append(sum(mask for unit, mask in enumerate(masks) if ideal >> unit & 1))
    return masks_of_cuts


def _states(search: PlacementSearch) -> list[list[float | int]]:
    """The rows of a search's states, in the form of the certificate."""
    rows: list[list[float | int]] = []
    counting = search.limits.counting
    for index, cut in enumerate(sorted(search.kept)):
        states = search.kept[cut]
        tables = [table for table in (states.times, states.loads) if table is not None]
        # Because of rounding, a stage with almost no work may have a time slightly below 0.
        parts = [np.maximum(column, 0.0) for table in tables for column in table.T]
        chosen = [np.full(len(states), index), states.first, states.replicas, states.demand, *parts]
        if counting.stages or counting.exact_stages:
            chosen.append(states.stages)
        if counting.workers:
            chosen.append(states.workers)
        rows += [list(row) for row in zip(*(column.tolist() for column in chosen), strict=True)]
    return rows
