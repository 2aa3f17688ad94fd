"""Checks the certificate of optimality in plan.json. docs/check.md states and proves the rules.

A certificate lists all spaces of plans; a space consists of the pipelines inside one component of a level of the
cluster, with copies in so many components of that level. For each space it claims that no pipeline has every resource
within some threshold. The claim is checked by closure: wherever a stage that keeps within the threshold may stand in
front of a state, the resulting state must be covered by a state of the certificate. The module also checks that no
space is missing and that the thresholds together imply that no plan is faster than the stated bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker import figures
from pipeplan.checker.certificates.charged_closure import charged_space, check_charged_closure
from pipeplan.checker.certificates.states import CertificateStates, dominated_states
from pipeplan.checker.certificates.transitions import StageCandidates, Transitions
from pipeplan.checker.document import DOUBLE_BUFFERED, FLUSHING, PlanDocument
from pipeplan.checker.model import CheckedModel, Flags, Floats
from pipeplan.checker.shared_cards import shared_cores_bound_s
from pipeplan.errors import InputError
from pipeplan.util.files import Node

Ints = NDArray[np.intp]
LARGEST_TABLE = 1 << 27
"""Largest number of entries of the table of demands, about 1 GiB."""
LARGEST_TOLERANCE = 1e-6
"""Largest relative tolerance that a certificate may state."""
AGREEMENT = 1e-6
"""Relative difference within which the bounds of two solvers are equal."""


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
    """A space of plans: one pipeline in each of `copies` consecutive components of a level."""

    level: int
    copies: int
    first: int = 0
    """The component of the first copy, counted from 0."""


def check_certificate(document: PlanDocument, model: CheckedModel) -> CertifiedBound | None:
    """The bound that the certificate proves; None where there is no certificate.

    Raises an `InputError` where the certificate cannot be checked or is wrong.
    """
    node = document.root.get("certificate")
    if node is None:
        return None
    charged = mark.boolean() if (mark := node.get("charged")) else False
    if not charged and document.schedule in FLUSHING:
        node.fail(f"for the schedule {document.schedule} only a certificate with everything charged can be checked")
    if not charged and not document.cluster.uniform:
        node.fail("where servers differ, only a certificate with everything charged can be checked")
    tolerance = node["tolerance"].number()
    if tolerance > LARGEST_TOLERANCE:
        node["tolerance"].fail(f"expected at most {LARGEST_TOLERANCE:g}, found {tolerance:g}")
    spaces, claims = _spaces(document), set[tuple[CertifiedSpace, int | None, int | None]]()
    bound, states = math.inf, 0
    for entry in node["spaces"].items():
        space = _space_of(entry)
        stages, replicas = (_optional(entry, key) for key in ("stages", "replicas"))
        if space not in spaces or (space, stages, replicas) in claims:
            entry.fail(f"there is no such space of plans, or it is listed twice: {_describe(space)}")
        if replicas is not None and not (charged and stages is not None and document.options.grid):
            entry["replicas"].fail("only the shapes of a uniform grid, with everything charged, are claimed one by one")
        claims.add((space, stages, replicas))
        restricted = _with_stages(document, stages)
        proven, checked = _check_space(restricted, model, entry, space, tolerance, charged=charged)
        bound, states = min(bound, proven), states + checked
    for space in sorted(spaces, key=lambda one: (-one.level, -one.copies, one.first)):
        alike = [one for one in spaces if _no_slower(document, one, space)]
        if not any(
            (one, None, None) in claims or all((one, *part) in claims for part in _parts(document, model, one))
            for one in alike
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
        least = _least_s(document, model, space, synchronisation)
        if floor.number() > least * (1 + tolerance):
            floor.fail(
                f"the copies of the pipeline compute and synchronise in {least!r} s, {floor.number()!r} is claimed"
            )
        return floor.number(), 0
    threshold = entry["threshold_s"].number() * (1 - tolerance)
    if document.schedule in FLUSHING:
        proven = threshold / (document.accumulate or 1)
    else:
        proven = float(figures.overlapped_s(threshold / space.copies, synchronisation, document.options.overlap))
    if not charged:
        return proven, check_closure(document, model, entry, space.level, space.copies, threshold, among)
    # A plan below this pace keeps every resource of a copy within the threshold, and what is shared within the pace.
    paces, grid = (threshold, proven), _optional(entry, "replicas")
    place = space.level, _workers(document, space)
    everything = charged_space(document, model, place, space.copies, among_s=among, paces=paces, grid=grid)
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


def _space_of(entry: Node) -> CertifiedSpace:
    first = number.integer() if (number := entry.get("first")) else 0
    return CertifiedSpace(entry["level"].integer(minimum=1), entry["copies"].integer(minimum=1), first)


def _spaces(document: PlanDocument) -> set[CertifiedSpace]:
    """All spaces of plans: the whole cluster, and any number of alike components of a level, each with enough workers.

    On equal servers they are the first components. Copies that would have no worker, or under 2BW no minibatch, are no
    plans.
    """
    cluster, options, network = document.cluster, document.options, document.network
    spaces = {CertifiedSpace(len(cluster.levels), 1)}
    most = options.max_workers or cluster.workers
    if document.schedule == DOUBLE_BUFFERED:
        most = min(most, document.accumulate or 1)
    for level in range(1, len(cluster.levels) if options.allow_copies and not options.grid else 1):
        sizes, above = (np.diff(np.array(network.starts[one])) for one in (level, level + 1))
        if len(sizes) == len(above):
            continue  # The level above joins one component each: the components are the same.
        for first in range(1 if cluster.uniform else len(sizes) - 1):
            if sizes[first] < max(2, options.stages or 1):
                continue
            for copies in range(2, len(sizes) - first + 1):
                if not cluster.alike(level, first, first + copies - 1):
                    break
                space = CertifiedSpace(level, copies, first)
                if not _equal_links(document, space):
                    document.root["certificate"].fail("it cannot be checked where the cards of a copy's servers differ")
                spaces.add(space)
    return {space for space in spaces if space.copies <= most}


def _workers(document: PlanDocument, space: CertifiedSpace) -> range:
    """The workers of the components that hold the copies."""
    starts = document.network.starts[space.level]
    return range(starts[space.first], starts[space.first + space.copies])


def _equal_links(document: PlanDocument, space: CertifiedSpace) -> bool:
    """Whether the copies' all-reduce is equally fast on whichever workers of their components a plan is."""
    if document.cluster.uniform:
        return True
    workers = _workers(document, space)
    ways = document.network.ways()[document.network.level(workers)]
    size = len(workers) // space.copies
    among = set()
    for one in range(size):
        links = [ways[worker] for worker in workers[one::size]]
        among.add((min(link.allreduce for link in links), max(link.latency_s for link in links)))
    return len(among) == 1


def _no_slower(document: PlanDocument, one: CertifiedSpace, other: CertifiedSpace) -> bool:
    """Whether the copies of one space cost no more than those of another: the same pipelines, on no slower links."""
    if one == other:
        return True
    if (one.level, one.copies) != (other.level, other.copies) or one.copies == 1:
        return False
    if not document.cluster.alike(one.level, one.first, other.first):
        return False
    mine, its = (_shared_links(document, space) for space in (one, other))
    return all(a >= b for a, b in zip(mine, its, strict=True))


def _shared_links(document: PlanDocument, space: CertifiedSpace) -> tuple[float, ...]:
    """The links among copies of the pipeline and the cards that lead there, on which the costs of copies depend."""
    network, workers = document.network, _workers(document, space)
    link = network.among(workers)
    joined = network.level(workers)
    cards = [network.cards[space.level][one] for one in range(space.first, space.first + space.copies)]
    slowest = (min(getattr(card, way) for card in cards) for way in ("message", "allreduce"))
    return link.message, link.allreduce, -link.latency_s, -joined, *slowest


def _with_stages(document: PlanDocument, stages: int | None) -> PlanDocument:
    """The document with the options changed to ask for exactly so many stages."""
    return document if stages is None else replace(document, options=replace(document.options, stages=stages))


def _optional(entry: Node, key: str) -> int | None:
    number = entry.get(key)
    return number.integer(minimum=1) if number else None


def _parts(document: PlanDocument, model: CheckedModel, space: CertifiedSpace) -> Iterator[tuple[int, int | None]]:
    """All numbers of stages that plans of a space may have, each with the number of replicas in a uniform grid."""
    options = document.options
    workers = len(_workers(document, space)) // space.copies
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
    link, size = document.network.among(_workers(document, space)), float(model.parameters.sum())
    return float(figures.ring_allreduce_s(space.copies, size, link.allreduce, link.latency_s))


def _work_s(document: PlanDocument, model: CheckedModel, space: CertifiedSpace) -> float:
    """Seconds per minibatch if all workers of a space share all work."""
    work = float((model.forward_s + model.backward_s + model.update_s).sum())
    return work / math.fsum(document.cluster.device_of(worker).speed for worker in _workers(document, space))


def _least_s(document: PlanDocument, model: CheckedModel, space: CertifiedSpace, synchronisation_s: float) -> float:
    """A pace that no plan of a space beats: all work on all of its workers, and the synchronisation of the copies."""
    work = _work_s(document, model, space)
    if document.schedule not in FLUSHING:
        return float(figures.overlapped_s(work, synchronisation_s, document.options.overlap))
    minibatches, copies = document.accumulate or 1, space.copies
    return math.ceil(minibatches / copies) * work * copies / minibatches


def _describe(space: CertifiedSpace) -> str:
    if space.copies == 1:
        return "one pipeline on the whole cluster"
    place = f" from component {space.first} on" if space.first else ""
    return f"{space.copies} copies of a pipeline, in components of level {space.level}{place}"
