"""The pace of a plan, implemented independently from docs/cost-model.md.

In the steady state it is that of the slowest resource, under a flush the time of a batch divided by its minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeplan.checker.document import DOUBLE_BUFFERED, FLUSHING, GPIPE, PlanDocument
from pipeplan.checker.figures import ROUNDING, StageFigures, exchange_s, group_wait, in_flight_depth, overlapped_s
from pipeplan.checker.loads import BatchParts, Load, boundary_name, busiest
from pipeplan.checker.virtual_batch import virtual_batch, virtual_loads

AMONG_COPIES = "synchronisation among the copies of the pipeline"
FILLING = "filling and draining the pipeline"
EXPOSED = "gradient synchronisation"
EXCHANGE = "exchange of the gradients of shared weights"
ORDER = "waiting for other stages between passes"


def steady_pace(document: PlanDocument, figures: Sequence[StageFigures], among_s: float) -> float:
    """Pace of an asynchronous schedule or of inference, in seconds per minibatch of all copies together.

    `among_s` is the time of one all-reduce among the copies.
    """
    slowest = max(load.seconds for load in _steady_loads(document, figures, among_s))
    among = among_s / update_interval(document)
    return float(overlapped_s(slowest / document.copies, among, document.options.overlap))


def slowest_resources(document: PlanDocument, figures: Sequence[StageFigures], among_s: float) -> frozenset[str]:
    """The names of the resources that determine the pace if each is used alone; several where they are equal."""
    if document.schedule in FLUSHING:
        parts = batch_parts(document, figures, among_s)
        steady = [Load(parts.steady_s, name) for name in steady_resources(document, figures)]
        rest = [
            (parts.work_s + parts.transfers_s, FILLING),
            (parts.exposed_s, EXPOSED),
            (parts.copies_s, AMONG_COPIES),
            (parts.shared_weights_s, EXCHANGE),
            (parts.order_s, ORDER),
        ]
        return busiest([*steady, *(Load(*part) for part in rest)])
    loads = [Load(load.seconds / document.copies, load.name) for load in _steady_loads(document, figures, among_s)]
    return busiest([*loads, Load(among_s / update_interval(document), AMONG_COPIES)])


def steady_resources(document: PlanDocument, figures: Sequence[StageFigures]) -> frozenset[str]:
    """The names of the resources that limit the steady part of a batch; several where they are equal."""
    if document.virtual:
        return busiest(virtual_loads(document, figures))
    share = _share(document)
    phases, limits = _phases(document, figures, share), _depth_limits(document, figures, share)
    longest = [max(load.seconds for load in phase) for phase in phases]
    if max((load.seconds for load in limits), default=0.0) > sum(longest) * (1 + ROUNDING):
        return busiest(limits)
    return frozenset().union(
        *(busiest(phase) for phase, time in zip(phases, longest, strict=True) if time >= max(longest) * (1 - ROUNDING))
    )


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


def batch_parts(document: PlanDocument, figures: Sequence[StageFigures], among_s: float) -> BatchParts:
    """The parts of one batch of a schedule with a flush. `among_s` is the time of one all-reduce among the copies."""
    share = _share(document)
    fastest = max(device.speed for device in document.cluster.devices)
    if document.virtual:
        return virtual_batch(document, figures, fastest)
    return BatchParts(
        minibatches=share,
        work_s=sum(stage.pass_s for stage in figures),
        transfers_s=sum(stage.round_trip_s for stage in figures),
        steady_s=max(
            sum(max(load.seconds for load in phase) for phase in _phases(document, figures, share)),
            max((load.seconds for load in _depth_limits(document, figures, share)), default=0.0),
        ),
        exposed_s=max(stage.exposed_s(fastest) for stage in figures),
        copies_s=among_s,
        shared_weights_s=sum(sum(exchange_s(document, stage)) for stage in figures),
    )


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


def _phases(document: PlanDocument, figures: Sequence[StageFigures], share: int) -> list[list[Load]]:
    """The term A of "Flush schedules" in docs/cost-model.md, as far as stages and boundaries determine it.

    It is the sum of the longest loads of all phases: GPipe has a forward and a backward phase, other schedules one.
    """

    def loads(times: Sequence[tuple[float, float]]) -> list[Load]:
        """The loads of one phase, from the time of a pass and of a message of every stage."""
        found = []
        for index, (stage, (computing, sending)) in enumerate(zip(figures, times, strict=True)):
            found.append(Load((math.ceil(share / stage.replicas) - 1) * computing, f"compute of stage {index + 1}"))
            found.append(Load((math.ceil(share / stage.lanes) - 1) * sending, boundary_name(index)))
        return found

    if document.schedule == GPIPE:
        forward = [(stage.forward_s + stage.executor_s / 2, stage.send_s) for stage in figures]
        backward = [(stage.pass_s - stage.forward_s - stage.executor_s / 2, stage.return_s) for stage in figures]
        return [loads(forward), loads(backward)]
    return [loads([(stage.pass_s, stage.busier_s) for stage in figures])]


def _depth_limits(document: PlanDocument, figures: Sequence[StageFigures], share: int) -> list[Load]:
    """The bounds on the term A from depths that are smaller than the number of minibatches of a replica."""
    limits = []
    for index, stage in enumerate(figures):
        if stage.depth < math.ceil(share / stage.replicas):
            pace = math.inf if document.schedule == GPIPE else _sustained(document, figures, index)
            limits.append(Load((share - 1) * pace, _depth(index)))
    return limits


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
