"""The pace of a plan, implemented independently from docs/cost-model.md.

In the steady state it is that of the slowest resource, under a flush the time of a batch divided by its minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeplan.checker.ddp_overlap import ddp_pace
from pipeplan.checker.document import DOUBLE_BUFFERED, FLUSHING, GPIPE, ZERO_BUBBLE, PlanDocument
from pipeplan.checker.figures import (
    ROUNDING,
    StageFigures,
    copies_allreduce_s,
    flush_depth,
    group_wait,
    in_flight_depth,
    overlapped_s,
    update_wait_s,
)
from pipeplan.checker.loads import BatchParts, Load, boundary_name, busiest
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.sharded import sharded_figures
from pipeplan.checker.shared_cards import card_loads, core_loads
from pipeplan.checker.virtual_batch import virtual_batches
from pipeplan.errors import InputError

AMONG_COPIES = "synchronisation among the copies of the pipeline"
FILLING = "filling and draining the pipeline"
EXPOSED = "gradient synchronisation"
ORDER = "waiting for other stages between passes"
AWAITED = "gradient synchronisation of stage 1, for which the next forward pass waits"
"""Name of the bound of plain data parallelism whose forward pass waits for the update."""


def steady_pace(document: PlanDocument, figures: Sequence[StageFigures], among_s: float) -> float:
    """Pace of an asynchronous schedule or of inference, in seconds per minibatch of all copies together.

    `among_s` is the time of one all-reduce among the copies.
    """
    slowest = max(load.seconds for load in _steady_loads(document, figures, among_s))
    among = among_s / update_interval(document)
    return float(overlapped_s(slowest / document.copies, among, document.options.overlap))


def slowest_resources(
    document: PlanDocument, model: CheckedModel, figures: Sequence[StageFigures], among_s: float
) -> frozenset[str]:
    """The names of the resources that determine the pace if each is used alone; several where they are equal."""
    if document.schedule in FLUSHING:
        return frozenset().union(*(_longest_parts(parts) for parts in slowest_batches(document, model, figures)))
    loads = [Load(load.seconds / document.copies, load.name) for load in _steady_loads(document, figures, among_s)]
    return busiest([*loads, Load(among_s / update_interval(document), AMONG_COPIES)])


def _longest_parts(parts: BatchParts) -> frozenset[str]:
    loads = [
        Load(parts.steady_s, parts.bound),
        Load(parts.work_s + parts.transfers_s, FILLING),
        Load(parts.exposed_s, EXPOSED),
        Load(parts.order_s, ORDER),
    ]
    return busiest(loads)


def _steady_loads(document: PlanDocument, figures: Sequence[StageFigures], among_s: float) -> list[Load]:
    """The resources of one copy, each with its time for a minibatch of that copy."""
    loads = []
    for index, stage in enumerate(figures):
        interval = _share(document) if document.accumulates else stage.replicas
        compute, exchange = stage.pass_s / stage.replicas, stage.allreduce_s / interval
        both = float(overlapped_s(compute, exchange, document.options.overlap))
        if compute >= exchange * (1 - ROUNDING):
            loads.append(Load(both, f"compute of stage {index + 1}"))
        if exchange >= compute * (1 - ROUNDING):
            loads.append(Load(both, f"gradient synchronisation of stage {index + 1}"))
        loads.append(Load(stage.busier_s / stage.lanes, boundary_name(index)))
        if not document.inference:
            loads.append(Load(_depth_pace(document, figures, index, among_s), _depth(index)))
    return loads


def _depth(index: int) -> str:
    return f"minibatches in flight at stage {index + 1}"


def slowest_batches(
    document: PlanDocument, model: CheckedModel, figures: Sequence[StageFigures]
) -> tuple[BatchParts, ...]:
    """The parts of one batch of a schedule with a flush; several, with other parts, where they are equally long."""
    waits = [update_wait_s(document, model, figure) for figure in figures]
    batches = (
        virtual_batches(document, figures, waits) if document.virtual else _batches(document, model, figures, waits)
    )
    found = list(batches)
    longest = max(parts.total_s for parts in found)
    return tuple(parts for parts in found if parts.total_s >= longest * (1 - ROUNDING))


def _batches(
    document: PlanDocument, model: CheckedModel, figures: Sequence[StageFigures], waits: Sequence[float]
) -> Iterator[BatchParts]:
    """The least time of a batch by every stage that waits for its update, and every resource from there on.

    Under zb-h1 gradients of weights may be computed while the pipeline drains: only forward passes and half of the
    transfers count as the way, a stage behind the first may have half of a backward pass left, and the waits of stages
    other than the first may hide behind the draining.
    """
    share, split = _share(document), document.schedule == ZERO_BUBBLE
    for begin, wait in enumerate(waits):
        way = trip = 0.0
        for index, stage in enumerate(figures[begin : begin + 1] if begin and split else figures[begin:], start=begin):
            forward, backward = stage.halves_s
            late = backward / 2 if split and index > begin else 0.0
            others = (math.ceil(share / stage.replicas) - 1) * stage.passes_s
            name = f"compute of stage {index + 1}"
            if document.options.divides_weights:
                name = sharded_figures(document, model).bound
            yield BatchParts(share, way + stage.passes_s - late, trip, others, wait, name)
            mine = forward if split else stage.passes_s
            if index + 1 < len(figures) and not document.options.contention:
                messages = math.ceil(share / stage.lanes) * stage.busier_s
                yield BatchParts(share, way + mine, trip, messages, wait, boundary_name(index))
            way, trip = way + mine, trip + stage.round_trip_s / (2 if split else 1)
    for index, stage in enumerate(figures[:-1]):
        if stage.depth < flush_depth(figures[index + 1], share, stage.replicas, everything=document.schedule == GPIPE):
            yield BatchParts(share, 0.0, 0.0, math.inf, 0.0, _depth(index))


def update_interval(document: PlanDocument) -> int:
    """Number of minibatches, of all copies together, for each all-reduce among the copies."""
    return document.accumulate or 1 if document.accumulates else document.copies


def _share(document: PlanDocument) -> int:
    """M′, the number of minibatches of one update in one copy."""
    minibatches = document.accumulate or 1
    if document.schedule in FLUSHING:
        return math.ceil(minibatches / document.copies)
    # With more copies than minibatches M′ is 0; the depth then fails the check in `_depth_pace`.
    return max(1, minibatches // document.copies)


def _depth_pace(document: PlanDocument, figures: Sequence[StageFigures], index: int, among_s: float) -> float:
    """Pace of one copy that a depth sustains; under 2BW at least the pace at which two weight versions suffice."""
    pace = _sustained(document, figures, index)
    if document.schedule == DOUBLE_BUFFERED:
        stage = figures[index]
        spare = (document.accumulate or 1) // document.copies - stage.depth * stage.replicas
        late = (stage.allreduce_s + among_s) / (spare + 1 / document.copies) if spare >= 0 else math.inf
        pace = max(pace, late)
    return pace


def _sustained(document: PlanDocument, figures: Sequence[StageFigures], index: int) -> float:
    """The smallest pace for which the depth formula gives at most the stage's depth; infinite where there is none."""
    if index + 1 == len(figures):
        return 0.0
    current, following = figures[index : index + 2]

    def wait(stage: StageFigures, pace: float) -> float:
        if document.accumulates:
            return 0.0
        return float(group_wait(stage.group_s, pace, stage.replicas, document.copies))

    def suffices(pace: float) -> bool:
        demand = following.depth * following.replicas + wait(following, pace)
        depth = in_flight_depth(demand, wait(current, pace), current.transfer_s, pace, current.replicas)
        return bool(depth <= current.depth)

    return _smallest(suffices)


def _smallest(holds: Callable[[float], bool]) -> float:
    """The smallest positive number for which a monotone predicate holds, by bisection.

    0 where it holds for all numbers, infinity where it holds for none.
    """
    low, high = 1e-30, 1e30
    if holds(low):
        return 0.0
    if not holds(high):
        return math.inf
    while high > low * (1 + 1e-14):
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class ChargedPace:
    """Paces in seconds per minibatch."""

    alone_s: float
    """Pace if every resource is used alone and no forward pass waits for an update."""
    pace_s: float
    """Pace with everything charged."""
    bound_by: frozenset[str]
    """Names of the resources that determine the pace; several where they are equal up to rounding."""


def charged_pace(document: PlanDocument, model: CheckedModel, figures: Sequence[StageFigures]) -> ChargedPace:
    """The pace of a plan. Raises an `InputError` where no pace can be kept or the shared cards cannot be added up."""
    among = copies_allreduce_s(document, model)
    if document.schedule in FLUSHING:
        alone = slowest_batches(document, model, figures)[0].total_s / update_interval(document)
    else:
        alone = steady_pace(document, figures, among)
    if math.isinf(alone):
        raise InputError("a stage has too few minibatches in flight to keep any pace")
    pace, candidates = alone, [(alone, slowest_resources(document, model, figures, among))]
    if document.options.contention:
        awaited = ddp_pace(document, model, figures)
        cards, cores = card_loads(document, figures), core_loads(document, figures)
        if cards is None:
            raise InputError("the replicas of the stages are too many to add up what each network card carries")
        candidates.append((awaited, frozenset({AWAITED})))
        if awaited > pace * (1 + ROUNDING):
            pace = awaited
        shared = max(load.seconds for load in (*cards, *cores))
        candidates.append((shared, busiest([*cards, *cores])))
        # A card with a single user has the load of that user, up to rounding.
        if shared > pace * (1 + ROUNDING):
            pace = shared
    bound_by = frozenset().union(*(names for time, names in candidates if time >= pace * (1 - 2 * ROUNDING)))
    return ChargedPace(alone, pace, bound_by)
