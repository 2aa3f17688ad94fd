"""Checks the certificate of optimality in plan.json. docs/check.md states and proves the rules.

A certificate lists all spaces of plans; a space consists of the pipelines inside one component of a level of the
cluster, with copies in so many components of that level. For each space it claims that no pipeline has every resource
within some threshold. The claim is checked by closure: wherever a stage that keeps within the threshold may stand in
front of a state, the resulting state must be covered by a state of the certificate. The module also checks that no
space is missing and that the thresholds together imply that no plan is faster than the stated bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker import figures
from pipeplan.checker.ddp_overlap import least_single_stage_pace, waits_for_update
from pipeplan.checker.document import DOUBLE_BUFFERED, FORWARD_ONLY, STASHING, VERTICAL, PlanDocument
from pipeplan.checker.model import CheckedModel, Flags, Floats
from pipeplan.checker.network import UniformRates
from pipeplan.checker.shared_cards import shared_cores_bound_s
from pipeplan.checker.states import CertificateStates, dominated_states
from pipeplan.checker.transitions import StageCandidates, Transitions
from pipeplan.errors import InputError
from pipeplan.util.files import Node
from pipeplan.util.units import show_time

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
class CertifiedSpace:
    """A space of plans: one pipeline in each of `copies` components of a level."""

    level: int
    copies: int


def check_certificate(document: PlanDocument, model: CheckedModel) -> str | None:
    """A sentence on the bound that the certificate proves; None where there is no certificate.

    Raises an `InputError` where the certificate cannot be checked or is wrong.
    """
    node = document.root.get("certificate")
    if node is None:
        return None
    if document.schedule not in SCHEDULES:
        node.fail(f"no certificate can be checked for the schedule {document.schedule}")
    if not document.cluster.uniform:
        node.fail("no certificate can be checked where servers differ")
    tolerance = node["tolerance"].number()
    if tolerance > LARGEST_TOLERANCE:
        node["tolerance"].fail(f"expected at most {LARGEST_TOLERANCE:g}, found {tolerance:g}")
    spaces, claims, spans = _spaces(document), set(), UniformRates.of(document.cluster).spans
    # The certificate may leave out plans of one stage; then these are evaluated one by one here.
    several = (mark.boolean() if (mark := node.get("several")) else False) and waits_for_update(document)
    copied = [(space.copies, spans[space.level]) for space in spaces if space.copies > 1]
    bound, states = least_single_stage_pace(document, model, copied) if several else math.inf, 0
    for entry in node["spaces"].items():
        space = CertifiedSpace(entry["level"].integer(minimum=1), entry["copies"].integer(minimum=1))
        stages = only.integer(minimum=1) if (only := entry.get("stages")) else None
        if space not in spaces or (space, stages) in claims:
            entry.fail(f"there is no such space of plans, or it is listed twice: {_describe(space)}")
        claims.add((space, stages))
        restricted = replace(_with_stages(document, stages), several=several)
        proven, checked = _check_space(restricted, model, entry, space, tolerance)
        bound, states = min(bound, proven), states + checked
    for space in sorted(spaces, key=lambda one: (-one.level, -one.copies)):
        if (space, None) not in claims and not all((space, n) in claims for n in _numbers(document, model, space)):
            node["spaces"].fail(f"nothing is claimed of {_describe(space)}, or not of all numbers of stages")
    bound = max(bound, shared_cores_bound_s(document, model))
    claimed = node.get("bound_s")
    least = claimed.number() if claimed else document.pace_s
    if bound < least * (1 - 2 * tolerance):
        node.fail(f"it shows only that no plan takes less than {bound!r} s, not {least!r} s")
    stated = document.root.get("bound_s")
    if stated and stated.number() > bound * (1 + AGREEMENT):
        stated.fail(f"stated {stated.number()!r}, the certificate shows {bound!r}")
    gap = 1 - bound / document.pace_s
    if gap > 2 * tolerance:
        return f"no plan takes less than {show_time(bound)}, {gap:.2%} below this one; states checked: {states}"
    return f"no plan is faster by more than {2 * tolerance:.0e} of the pace; states checked: {states}"


def _check_space(
    document: PlanDocument, model: CheckedModel, entry: Node, space: CertifiedSpace, tolerance: float
) -> tuple[float, int]:
    """The pace that no plan of a space beats, in seconds per minibatch, and the number of states that were checked."""
    among = _among(document, model, space)
    synchronisation = among / (document.accumulate or 1 if document.accumulates else space.copies)
    if (floor := entry.get("floor_s")) is not None:
        least = figures.overlapped_s(_work_s(document, model, space), synchronisation, document.options.overlap)
        if floor.number() > least * (1 + tolerance):
            floor.fail(
                f"the copies of the pipeline compute and synchronise in {least!r} s, {floor.number()!r} is claimed"
            )
        return floor.number(), 0
    threshold = entry["threshold_s"].number() * (1 - tolerance)
    checked = check_closure(document, model, entry, space.level, space.copies, threshold, among)
    return float(figures.overlapped_s(threshold / space.copies, synchronisation, document.options.overlap)), checked


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
    closure = _Closure(entry, steps, states, document.several, _least_demand(steps, states))
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
    several: bool
    """Whether plans of one stage are left out."""
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
    if closure.several and int(states.cut[state]) == len(steps.cuts) - 1:
        within &= stretch.before[taken] > 0
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


def _spaces(document: PlanDocument) -> set[CertifiedSpace]:
    """All spaces of plans: the whole cluster, and any number of components of a level that has enough workers in each.

    Copies that would have no worker, or under 2BW no minibatch, are no plans.
    """
    cluster, options = document.cluster, document.options
    spaces = {CertifiedSpace(len(cluster.levels), 1)}
    most = options.max_workers or cluster.workers
    if document.schedule == DOUBLE_BUFFERED:
        most = min(most, document.accumulate or 1)
    spans = UniformRates.of(cluster).spans
    for level in range(1, len(cluster.levels)):
        # Where a level joins one component, the component inside it is the same.
        enough = spans[level] >= max(2, options.stages or 1) and spans[level] < spans[level + 1]
        if options.allow_copies and enough:
            spaces |= {CertifiedSpace(level, copies) for copies in range(2, cluster.workers // spans[level] + 1)}
    return {space for space in spaces if space.copies <= most}


def _with_stages(document: PlanDocument, stages: int | None) -> PlanDocument:
    """The document with the options changed to ask for exactly so many stages."""
    return document if stages is None else replace(document, options=replace(document.options, stages=stages))


def _numbers(document: PlanDocument, model: CheckedModel, space: CertifiedSpace) -> range:
    """All numbers of stages that plans of a space may have."""
    options = document.options
    if options.stages is not None:
        return range(options.stages, options.stages + 1)
    workers = UniformRates.of(document.cluster).spans[space.level]
    most = min(len(model.blocks), workers, options.max_stages or workers)
    return range(max((stage for _, stage in options.pins), default=1), most + 1)


def _among(document: PlanDocument, model: CheckedModel, space: CertifiedSpace) -> float:
    """Time of one all-reduce of the whole model among the copies, in seconds."""
    if space.copies == 1 or not model.training:
        return 0.0
    rates, size = UniformRates.of(document.cluster), float(model.parameters.sum())
    joined = rates.level(0, space.copies * rates.spans[space.level] - 1)
    return float(figures.ring_allreduce_s(space.copies, size, rates.allreduce[joined], rates.latency_s[joined]))


def _work_s(document: PlanDocument, model: CheckedModel, space: CertifiedSpace) -> float:
    """Seconds per minibatch if all workers of a space share all work."""
    work = float((model.forward_s + model.backward_s + model.update_s).sum())
    workers = space.copies * UniformRates.of(document.cluster).spans[space.level]
    return work / (workers * document.cluster.device.speed)


def _describe(space: CertifiedSpace) -> str:
    if space.copies == 1:
        return "one pipeline on the whole cluster"
    return f"{space.copies} copies of a pipeline, one in each of the first components of level {space.level}"
