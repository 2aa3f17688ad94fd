"""Checks the certificate of optimality in plan.json. docs/proof.md states and proves the rules.

A certificate lists all spaces of plans. A space consists of the pipelines inside one component of a level of the
cluster, with one copy in each of several components of that level. For each space the certificate claims that no
pipeline keeps every resource within a threshold. The module checks that the states are closed: if a stage within the
threshold can be put in front of a state, a state of the certificate must cover the resulting state. It also checks that
no space is missing, and that the thresholds together imply that no plan is faster than the stated bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeplan.checker import formulas
from pipeplan.checker.certificates.closure import check_closure, stage_space
from pipeplan.checker.document import DOUBLE_BUFFERED, PlanDocument
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.shared_cards import shared_cores_bound_s
from pipeplan.util.files import Node

LARGEST_TOLERANCE = 1e-6
"""Largest relative tolerance that a certificate may state."""
AGREEMENT = 1e-6
"""Relative difference within which the bounds of two solvers count as equal."""


@dataclass(frozen=True)
class CertifiedBound:
    """The bound that a certificate proves."""

    bound_s: float
    """The step time that no plan of the searched space beats, in seconds per minibatch."""
    tolerance: float
    states: int
    """Number of states that were checked."""


@dataclass(frozen=True)
class CertifiedSpace:
    """A space of plans: one pipeline in each of `copies` consecutive components of a level."""

    level: int
    copies: int
    first: int = 0
    """The component of the first copy, from 0."""


def check_certificate(document: PlanDocument, model: CheckedModel) -> CertifiedBound | None:
    """The bound that the certificate proves; None if there is no certificate.

    Raises an `InputError` if the certificate is wrong or cannot be checked.
    """
    node = document.root.get("certificate")
    if node is None:
        return None
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
        if replicas is not None and not (stages is not None and document.options.grid):
            entry["replicas"].fail("only the shapes of a uniform grid are claimed one by one")
        claims.add((space, stages, replicas))
        proven, checked = _check_space(_with_stages(document, stages), model, entry, space, tolerance)
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
    least = claimed.number() if claimed else document.step_time_s
    if bound < least * (1 - 2 * tolerance):
        node.fail(f"it shows only that no plan takes less than {bound!r} s, not {least!r} s")
    stated = document.root.get("bound_s")
    if stated and stated.number() > bound * (1 + AGREEMENT):
        stated.fail(f"stated {stated.number()!r}, the certificate shows {bound!r}")
    return CertifiedBound(bound, tolerance, states)


def _check_space(
    document: PlanDocument, model: CheckedModel, entry: Node, space: CertifiedSpace, tolerance: float
) -> tuple[float, int]:
    """(step time that no plan of a space beats, in seconds per minibatch; number of checked states)."""
    among = _among(document, model, space)
    synchronisation = among / document.update_interval(space.copies)
    if (floor := entry.get("floor_s")) is not None:
        least = _least_s(document, model, space, synchronisation)
        if floor.number() > least * (1 + tolerance):
            floor.fail(
                f"the copies of the pipeline compute and synchronise in {least!r} s, {floor.number()!r} is claimed"
            )
        return floor.number(), 0
    threshold = entry["threshold_s"].number() * (1 - tolerance)
    if document.flushes:
        proven = threshold / document.minibatches
    else:
        proven = float(formulas.overlapped_s(threshold / space.copies, synchronisation, document.options.overlap))
    # A plan below this step time keeps every resource of a copy within the threshold, and every shared resource within
    # the step time.
    step_times, grid = (threshold, proven), _optional(entry, "replicas")
    place = space.level, _workers(document, space)
    everything = stage_space(document, model, place, space.copies, among_s=among, step_times=step_times, grid=grid)
    return proven, check_closure(everything, entry, document.options, grid)


def _space_of(entry: Node) -> CertifiedSpace:
    first = number.integer() if (number := entry.get("first")) else 0
    return CertifiedSpace(entry["level"].integer(minimum=1), entry["copies"].integer(minimum=1), first)


def _spaces(document: PlanDocument) -> set[CertifiedSpace]:
    """All spaces of plans: the whole cluster, and any number of equal components of a level, each with enough workers.

    On equal servers the copies are in the first components. Spaces in which a copy has no worker, or under 2BW no
    minibatch, are left out.
    """
    cluster, options, network = document.cluster, document.options, document.network
    spaces = {CertifiedSpace(len(cluster.levels), 1)}
    most = options.max_workers or cluster.workers
    if document.schedule == DOUBLE_BUFFERED:
        most = min(most, document.minibatches)
    for level in range(1, len(cluster.levels) if options.allow_copies and not options.grid else 1):
        sizes, above = (np.diff(np.array(network.starts[one])) for one in (level, level + 1))
        if len(sizes) == len(above):
            continue  # Each component of the level above has one component of this level: the components are the same.
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
    """Whether the copies' all-reduce has the same speed on any workers of their components."""
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
    """Whether the copies of one space cost no more than the copies of another space: their pipelines are the same, and
    their links no slower.
    """
    if one == other:
        return True
    if (one.level, one.copies) != (other.level, other.copies) or one.copies == 1:
        return False
    if not document.cluster.alike(one.level, one.first, other.first):
        return False
    mine, its = (_shared_links(document, space) for space in (one, other))
    return all(a >= b for a, b in zip(mine, its, strict=True))


def _shared_links(document: PlanDocument, space: CertifiedSpace) -> tuple[float, ...]:
    """The rates that determine the costs of copies: of the links among the copies, and of the cards to these links."""
    network, workers = document.network, _workers(document, space)
    link = network.among(workers)
    joined = network.level(workers)
    cards = [network.cards[space.level][one] for one in range(space.first, space.first + space.copies)]
    slowest = (min(getattr(card, way) for card in cards) for way in ("message", "allreduce"))
    return link.message, link.allreduce, -link.latency_s, -joined, *slowest


def _with_stages(document: PlanDocument, stages: int | None) -> PlanDocument:
    """The document with options that ask for exactly this number of stages."""
    return document if stages is None else replace(document, options=replace(document.options, stages=stages))


def _optional(entry: Node, key: str) -> int | None:
    number = entry.get(key)
    return number.integer(minimum=1) if number else None


def _parts(document: PlanDocument, model: CheckedModel, space: CertifiedSpace) -> Iterator[tuple[int, int | None]]:
    """(number of stages, number of replicas in a uniform grid) for all plans that a space may have."""
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
    return float(formulas.ring_allreduce_s(space.copies, size, link.allreduce, link.latency_s))


def _least_s(document: PlanDocument, model: CheckedModel, space: CertifiedSpace, synchronisation_s: float) -> float:
    """A step time that no plan of a space beats: the time of all work on all workers of the space, and of the
    synchronisation of the copies.
    """
    # All workers share all work equally.
    work = float((model.forward_s + model.backward_s + model.update_s).sum())
    work /= math.fsum(document.cluster.device_of(worker).speed for worker in _workers(document, space))
    if not document.flushes:
        return float(formulas.overlapped_s(work, synchronisation_s, document.options.overlap))
    return document.share(space.copies) * work * space.copies / document.minibatches


def _describe(space: CertifiedSpace) -> str:
    if space.copies == 1:
        return "one pipeline on the whole cluster"
    place = f" from component {space.first} on" if space.first else ""
    return f"{space.copies} copies of a pipeline, in components of level {space.level}{place}"
