"""Checks the certificate of optimality in plan.json. docs/check.md states and proves the rules.

A certificate lists all spaces of plans; a space consists of the pipelines inside one component of a level of the
cluster, repeated in all its components. For each space it claims that no pipeline has every resource within some
threshold. The claim is checked by closure: wherever a stage that keeps within the threshold may stand in front of a
state, the resulting state must be covered by a state of the certificate. The module also checks that no space is
missing and that the thresholds together imply that no plan is faster than the stated bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker import figures
from pipeplan.checker.charged_closure import charged_space, check_charged_closure
from pipeplan.checker.document import DOUBLE_BUFFERED, FORWARD_ONLY, STASHING, VERTICAL, PlanDocument
from pipeplan.checker.model import CheckedModel, Flags, Floats
from pipeplan.checker.shared_cards import shared_cores_bound_s
from pipeplan.checker.states import CertificateStates, dominated_states
from pipeplan.checker.transitions import StageCandidates, Transitions
from pipeplan.errors import InputError
from pipeplan.util.files import Node

Ints = NDArray[np.intp]
LARGEST_TABLE = 1 << 27
"""Largest number of entries of the table of demands, about 1 GiB."""
LARGEST_TOLERANCE = 1e-6
"""Largest relative tolerance that a certificate may state."""
AGREEMENT = 1e-6
"""Relative difference within which the bounds of two solvers are equal."""
SCHEDULES = (STASHING, VERTICAL, DOUBLE_BUFFERED, FORWARD_ONLY)
"""Schedules for which a certificate can be checked."""


@dataclass(frozen=True)
class CertifiedBound:
    """The bound that a certificate proves."""

    bound_s: float
    """The pace that no plan of the searched space beats, in seconds per minibatch."""
    tolerance: float
    states: int
    """Number of states that were checked."""


@dataclass(frozen=True)
class CertifiedSpace:
    """A space of plans: one pipeline in each of the `copies` components of a level."""

    level: int
    copies: int


def check_certificate(document: PlanDocument, model: CheckedModel) -> CertifiedBound | None:
    """The bound that the certificate proves; None where there is no certificate.

    Raises an `InputError` where the certificate cannot be checked or is wrong.
    """
    node = document.root.get("certificate")
    if node is None:
        return None
    if document.schedule not in SCHEDULES:
        node.fail(f"no certificate can be checked for the schedule {document.schedule}")
    charged = mark.boolean() if (mark := node.get("charged")) else False
    if not charged and not document.cluster.uniform:
        node.fail("where servers differ, only a certificate with everything charged can be checked")
    tolerance = node["tolerance"].number()
    if tolerance > LARGEST_TOLERANCE:
        node["tolerance"].fail(f"expected at most {LARGEST_TOLERANCE:g}, found {tolerance:g}")
    spaces, claims = _spaces(document), set()
    bound, states = math.inf, 0
    for entry in node["spaces"].items():
        space = CertifiedSpace(entry["level"].integer(minimum=1), entry["copies"].integer(minimum=1))
        stages, replicas = (_optional(entry, key) for key in ("stages", "replicas"))
        if space not in spaces or (space, stages, replicas) in claims:
            entry.fail(f"there is no such space of plans, or it is listed twice: {_describe(space)}")
        if replicas is not None and not (charged and stages is not None and document.options.grid):
            entry["replicas"].fail("only the shapes of a uniform grid, with everything charged, are claimed one by one")
        claims.add((space, stages, replicas))
        restricted = _with_stages(document, stages)
        proven, checked = _check_space(restricted, model, entry, space, tolerance, charged=charged)
        bound, states = min(bound, proven), states + checked
    for space in spaces:
        if (space, None, None) not in claims and not all(
            (space, *part) in claims for part in _parts(document, model, space)
        ):
            node["spaces"].fail(f"nothing is claimed of {_describe(space)}, or not of all numbers of stages")
    bound = max(bound, shared_cores_bound_s(document, model))
    claimed = node.get("bound_s")
    least = claimed.number() if claimed else document.pace_s
    if bound < least * (1 - 2 * tolerance):
        node.fail(f"it shows only that no plan takes less than {bound!r} s, not {least!r} s")
    stated = document.root.get("bound_s")
    # A solver that charges what workers share may know a higher bound, which a certificate without it does not show.
    if stated and stated.number() > max(bound, document.charged_bound_s) * (1 + AGREEMENT):
        stated.fail(f"stated {stated.number()!r}, the certificate shows {bound!r}")
    return CertifiedBound(bound, tolerance, states)


def _check_space(
    document: PlanDocument,
    model: CheckedModel,
    entry: Node,
    space: CertifiedSpace,
    tolerance: float,
    *,
    charged: bool,
) -> tuple[float, int]:
    """The pace that no plan of a space beats, in seconds per minibatch, and the number of states that were checked."""
    among = _among(document, model, space)
    synchronisation = among / (document.accumulate or 1 if document.accumulates else space.copies)
    if (floor := entry.get("floor_s")) is not None:
        if floor.number() > synchronisation * (1 + tolerance):
            floor.fail(
                f"the copies of the pipeline synchronise in {synchronisation!r} s, {floor.number()!r} is claimed"
            )
        return floor.number(), 0
    threshold = entry["threshold_s"].number() * (1 - tolerance)
    proven = float(figures.overlapped_s(threshold / space.copies, synchronisation, document.options.overlap))
    if not charged:
        return proven, check_closure(document, model, entry, space.level, space.copies, threshold, among)
    # A plan below this pace keeps every resource of a copy within the threshold, and what is shared within the pace.
    paces, grid = (threshold, proven), _optional(entry, "replicas")
    everything = charged_space(document, model, space.level, space.copies, among_s=among, paces=paces, grid=grid)
    return proven, check_charged_closure(everything, entry, document.options, grid)


def check_closure(
    document: PlanDocument, model: CheckedModel, entry: Node, level: int, copies: int, threshold: float, among_s: float
) -> int:
    """Check the states of one space of plans, and return their number.

    `threshold`, in seconds per minibatch of one copy, is the pace that no pipeline may reach; `among_s` is the time of
    one all-reduce among the copies. Raises an `InputError` that names a stage which completes a faster plan, or leads
    to a state that the certificate does not cover.
    """
    steps = Transitions.of(document, model, level, copies, threshold, among_s)
    states = CertificateStates.of(entry, steps, document.options)
    closure = _Closure(entry, steps, states, _least_demand(steps, states))
    for cut in np.unique(states.cut):
        at_cut = np.flatnonzero(states.cut == cut)
        stretch = steps.behind(int(cut), states.first[at_cut])
        for state in at_cut:
            _check_state(closure, stretch, int(state))
    return len(states.cut)


@dataclass(frozen=True)
class _Closure:
    """The certificate's claim for one space of plans, with the tables needed to check it."""

    entry: Node
    steps: Transitions
    states: CertificateStates
    least: Floats
    """The least demand among the states that dominate a state, an array indexed by the state's cut, first worker,
    level, stages, busy workers and replicas; infinite where there is none."""


@dataclass(frozen=True)
class _Leads:
    """Stages that may stand in front of one state, and the states that they lead to. Arrays with one entry a stage."""

    taken: Ints
    """Indices of the stages in the stretch."""
    demand: Floats
    """Demand of the resulting states."""
    stages: Ints
    """Number of stages of the resulting states."""
    busy: Ints
    """Number of busy workers of the resulting states."""

    def take(self, rows: Ints | Flags) -> _Leads:
        """The entries that `rows` selects."""
        return _Leads(self.taken[rows], self.demand[rows], self.stages[rows], self.busy[rows])


def _check_state(closure: _Closure, stretch: StageCandidates, state: int) -> None:
    """Check all stages that may stand in front of a state. Raises an `InputError` where one is not covered."""
    states, steps = closure.states, closure.steps
    allowed = _allowed(closure, stretch, state)
    done = stretch.before[allowed.taken] == 0
    met = done & (allowed.stages == states.most_stages) if states.same_stages else done
    if met.any():
        step = steps.words(stretch, int(allowed.taken[np.flatnonzero(met)[0]]))
        closure.entry.fail(f"{step} completes a faster plan in front of state {states.as_stated[state]}")
    going = allowed.take(~done & ~_hopeless(closure, stretch, allowed))
    to, lanes = going.taken, stretch.replicas[going.taken] * states.counts_replicas
    known = closure.least[stretch.before[to], stretch.start[to], stretch.span[to], going.stages, going.busy, lanes]
    missing = np.flatnonzero(known > going.demand)
    if len(missing):
        step = steps.words(stretch, int(to[missing[0]]))
        closure.entry.fail(f"{step} in front of state {states.as_stated[state]} leads to no state of the certificate")


def _allowed(closure: _Closure, stretch: StageCandidates, state: int) -> _Leads:
    """The stages that fit in front of a state and are within the user's limits."""
    states, steps = closure.states, closure.steps
    taken, demand = steps.taken(
        stretch,
        int(states.first[state]),
        int(states.span[state]),
        float(states.demand[state]),
        float(states.replicas[state]),
    )
    stages = np.full(len(taken), states.stages[state] + states.counts_stages)
    busy = states.busy[state] + stretch.replicas[taken] * states.counts_busy
    within = (stages <= states.most_stages) & (busy <= states.most_busy)
    for layer, stage in states.pins:
        # The layers inside the cut are those of the stages still to be placed.
        within &= steps.totals.holds(stretch.before[taken], layer) == (stage <= states.most_stages - stages)
    return _Leads(taken, demand, stages, busy).take(within)


def _hopeless(closure: _Closure, stretch: StageCandidates, leads: _Leads) -> Flags:
    """Whether each stage leads to a state in front of which no pipeline can exist."""
    states = closure.states
    room = stretch.start[leads.taken]
    if states.counts_busy:
        room = np.minimum(room, states.most_busy - leads.busy)
    lost = closure.steps.hopeless(stretch.before[leads.taken], room, leads.demand)
    return lost | (leads.stages == states.most_stages) if states.counts_stages else lost


def _least_demand(steps: Transitions, states: CertificateStates) -> Floats:
    """The table `_Closure.least`. Raises an `InputError` where it would be too large."""
    counts = states.most_stages + 1, states.most_busy + 1, (steps.workers if states.counts_replicas else 0) + 1
    shape = (len(steps.cuts), steps.workers, len(steps.rates.spans), *counts)
    if np.prod(shape, dtype=float) > LARGEST_TABLE:
        raise InputError("the certificate is of a model or a cluster too large to check")
    least = np.full(shape, np.inf)
    known: dict[tuple[int, int], Flags] = {}
    # No stage leads to the cut of all layers.
    for state in np.flatnonzero(states.cut < len(steps.cuts) - 1):
        key = int(states.first[state]), int(states.span[state])
        if key not in known:
            known[key] = dominated_states(steps.rates, key)
        stages, busy = int(states.stages[state]), int(states.busy[state])
        behind = slice(stages, stages + 1 if states.same_stages else None)
        replicas = slice(int(states.replicas[state]) + 1 if states.counts_replicas else None)
        part = least[int(states.cut[state])][:, :, behind, busy:, replicas]
        part[known[key]] = np.minimum(part[known[key]], states.demand[state])
    return least


def _spaces(document: PlanDocument) -> list[CertifiedSpace]:
    """All spaces of plans: the whole cluster, and every level whose components have enough workers for a pipeline.

    Copies are all alike, so the components of their level must be alike, too.
    """
    cluster = document.cluster
    spaces = [CertifiedSpace(len(cluster.levels), 1)]
    network = document.network
    for level in range(len(cluster.levels) - 1, 0, -1):
        sizes = np.diff(np.array(network.starts[level]))
        enough = sizes.max() >= max(2, document.options.stages or 1)
        # A level that joins one component has the same components as the one inside it.
        new = sizes.max() < cluster.workers // spaces[-1].copies
        if document.options.allow_copies and not document.options.grid and enough and new and cluster.alike(level):
            spaces.append(CertifiedSpace(level, len(sizes)))
    return spaces


def _with_stages(document: PlanDocument, stages: int | None) -> PlanDocument:
    """The document with the options changed to ask for exactly so many stages."""
    return document if stages is None else replace(document, options=replace(document.options, stages=stages))


def _optional(entry: Node, key: str) -> int | None:
    number = entry.get(key)
    return number.integer(minimum=1) if number else None


def _parts(document: PlanDocument, model: CheckedModel, space: CertifiedSpace) -> Iterator[tuple[int, int | None]]:
    """All numbers of stages that plans of a space may have, each with the number of replicas in a uniform grid."""
    options = document.options
    workers = document.cluster.workers // space.copies
    most = min(len(model.blocks), workers, options.max_stages or workers)
    least = max((stage for _, stage in options.pins), default=1)
    for stages in range(least, most + 1) if options.stages is None else (options.stages,):
        if not options.grid:
            yield stages, None
            continue
        ends = list(itertools.accumulate(document.cluster.server_sizes))
        shared = document.accumulate or 0 if document.accumulates else 0
        for busy in {*range(1, ends[0]), *ends}:
            replicas, rest = divmod(busy, stages)
            allowed = replicas <= (options.max_replicas or replicas) and busy <= (options.max_workers or busy)
            if replicas and not rest and shared % replicas == 0 and allowed:
                yield stages, replicas


def _among(document: PlanDocument, model: CheckedModel, space: CertifiedSpace) -> float:
    """Time of one all-reduce of the whole model among the copies, in seconds."""
    if space.copies == 1 or not model.training:
        return 0.0
    link, size = document.network.inside[-1][0], float(model.parameters.sum())
    return float(figures.ring_allreduce_s(space.copies, size, link.allreduce, link.latency_s))


def _describe(space: CertifiedSpace) -> str:
    if space.copies == 1:
        return "one pipeline on the whole cluster"
    return f"{space.copies} copies of a pipeline, one in each component of level {space.level}"
