"""Checks the certificate of optimality in plan.json. docs/check.md states and proves the rules.

A certificate lists all spaces of plans; a space consists of the pipelines inside one component of a level of the
cluster, repeated in all its components. For each space it claims that no pipeline has every resource within some
threshold. `closure` checks this claim. This module checks that no space is missing and that the thresholds together
imply that no plan is faster than the stated bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipeplan.check import closure, formulas
from pipeplan.check.awaited import least_of_one_stage, waits
from pipeplan.check.cards import least_s
from pipeplan.check.document import DOUBLE_BUFFERED, FORWARD_ONLY, STASHING, VERTICAL, Document
from pipeplan.check.model import Model
from pipeplan.check.rates import Rates
from pipeplan.files import Node
from pipeplan.units import show_time

LARGEST_TOLERANCE = 1e-6
"""Largest relative tolerance that a certificate may state."""
AGREEMENT = 1e-6
"""Relative difference within which the bounds of two solvers are equal."""
SCHEDULES = (STASHING, VERTICAL, DOUBLE_BUFFERED, FORWARD_ONLY)
"""Schedules for which a certificate can be checked."""


@dataclass(frozen=True)
class Space:
    """A space of plans: one pipeline in each of the `copies` components of a level."""

    level: int
    copies: int


def check_certificate(document: Document, model: Model) -> str | None:
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
    spaces, claims = _spaces(document), set()
    # The certificate may leave out plans of one stage; then these are evaluated one by one here.
    several = (mark.boolean() if (mark := node.get("several")) else False) and waits(document)
    copied = [(space.copies, document.cluster.workers // space.copies) for space in spaces if space.copies > 1]
    bound, states = least_of_one_stage(document, model, copied) if several else math.inf, 0
    for entry in node["spaces"].items():
        space = Space(entry["level"].integer(minimum=1), entry["copies"].integer(minimum=1))
        stages = only.integer(minimum=1) if (only := entry.get("stages")) else None
        if space not in spaces or (space, stages) in claims:
            entry.fail(f"there is no such space of plans, or it is listed twice: {_describe(space)}")
        claims.add((space, stages))
        asked = replace(_with_stages(document, stages), several=several)
        proven, checked = _check_space(asked, model, entry, space, tolerance)
        bound, states = min(bound, proven), states + checked
    for space in spaces:
        if (space, None) not in claims and not all((space, n) in claims for n in _numbers(document, model, space)):
            node["spaces"].fail(f"nothing is claimed of {_describe(space)}, or not of all numbers of stages")
    bound = max(bound, least_s(document, model))
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


def _check_space(document: Document, model: Model, entry: Node, space: Space, tolerance: float) -> tuple[float, int]:
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
    checked = closure.check(document, model, entry, space.level, space.copies, threshold, among)
    return float(formulas.together(threshold / space.copies, synchronisation, document.asked.overlap)), checked


def _spaces(document: Document) -> list[Space]:
    """All spaces of plans: the whole cluster, and every level whose components have enough workers for a pipeline."""
    cluster = document.cluster
    spaces = [Space(len(cluster.levels), 1)]
    spans = Rates.of(cluster).spans
    for level in range(len(cluster.levels) - 1, 0, -1):
        enough = spans[level] >= max(2, document.asked.stages or 1)
        # A level that joins one component has the same components as the one inside it.
        if document.asked.allow_copies and enough and spans[level] < spans[spaces[-1].level]:
            spaces.append(Space(level, cluster.workers // spans[level]))
    return spaces


def _with_stages(document: Document, stages: int | None) -> Document:
    """The document with the options changed to ask for exactly so many stages."""
    return document if stages is None else replace(document, asked=replace(document.asked, stages=stages))


def _numbers(document: Document, model: Model, space: Space) -> range:
    """All numbers of stages that plans of a space may have."""
    asked = document.asked
    if asked.stages is not None:
        return range(asked.stages, asked.stages + 1)
    workers = document.cluster.workers // space.copies
    most = min(len(model.blocks), workers, asked.max_stages or workers)
    return range(max((stage for _, stage in asked.pins), default=1), most + 1)


def _among(document: Document, model: Model, space: Space) -> float:
    """Time of one all-reduce of the whole model among the copies, in seconds."""
    if space.copies == 1 or not model.training:
        return 0.0
    rates, size = Rates.of(document.cluster), float(model.parameters.sum())
    return float(formulas.ring(space.copies, size, rates.allreduce[-1], rates.latency_s[-1]))


def _describe(space: Space) -> str:
    if space.copies == 1:
        return "one pipeline on the whole cluster"
    return f"{space.copies} copies of a pipeline, one in each component of level {space.level}"
