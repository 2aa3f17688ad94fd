"""The pace of a plan, implemented independently from docs/cost-model.md.

In the steady state it is that of the slowest resource, under a flush the time of a batch divided by its minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeplan.checker.document import DOUBLE_BUFFERED, FLUSHING, GPIPE, PlanDocument
from pipeplan.checker.figures import StageFigures, group_wait, in_flight_depth, overlapped_s


@dataclass(frozen=True)
class BatchParts:
    """The parts of the time from one update to the next under a flush, in seconds.

    The field names are those of the JSON object `batch` in plan.json.
    """

    minibatches: int
    """Minibatches per update in one copy."""
    work_s: float
    """Forward and backward passes of the first minibatch through all stages."""
    transfers_s: float
    """Transfers of the first minibatch over all boundaries, in both directions."""
    steady_s: float
    """Time that the other minibatches add."""
    exposed_s: float
    """Exposed all-reduce time."""
    copies_s: float
    """All-reduce among copies of the pipeline."""

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return self.work_s + self.transfers_s + self.steady_s + self.exposed_s + self.copies_s


def steady_pace(document: PlanDocument, figures: Sequence[StageFigures], among_s: float) -> float:
    """Pace of an asynchronous schedule or of inference, in seconds per minibatch of all copies together.

    `among_s` is the time of one all-reduce among the copies.
    """
    slowest = 0.0
    for index, stage in enumerate(figures):
        interval = _share(document) if document.accumulates else stage.replicas
        exchange = stage.allreduce_s / interval
        slowest = max(
            slowest,
            float(overlapped_s(stage.pass_s / stage.replicas, exchange, document.options.overlap)),
            stage.busier_s / stage.lanes,
            0.0 if document.inference else _depth_pace(document, figures, index, among_s),
        )
    among = among_s / update_interval(document)
    return float(overlapped_s(slowest / document.copies, among, document.options.overlap))


def batch_parts(document: PlanDocument, figures: Sequence[StageFigures], among_s: float) -> BatchParts:
    """The parts of one batch of a schedule with a flush. `among_s` is the time of one all-reduce among the copies."""
    share = _share(document)
    fastest = max(device.speed for device in document.cluster.devices)
    return BatchParts(
        minibatches=share,
        work_s=sum(stage.pass_s for stage in figures),
        transfers_s=sum(stage.round_trip_s for stage in figures),
        steady_s=max(_others(document, figures, share), _limited(document, figures, share)),
        exposed_s=max(max(0.0, stage.allreduce_s - stage.before_s / fastest) for stage in figures),
        copies_s=among_s,
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


def _others(document: PlanDocument, figures: Sequence[StageFigures], share: int) -> float:
    """The term A of "Flush schedules" in docs/cost-model.md, as far as stages and boundaries determine it."""

    def after_first(time: float, servers: int) -> float:
        return (math.ceil(share / servers) - 1) * time

    if document.schedule == GPIPE:
        forward = [max(after_first(s.forward_s, s.replicas), after_first(s.send_s, s.lanes)) for s in figures]
        backward = [
            max(after_first(s.backward_s + s.update_s, s.replicas), after_first(s.return_s, s.lanes)) for s in figures
        ]
        return max(forward) + max(backward)
    return max(max(after_first(s.pass_s, s.replicas), after_first(s.busier_s, s.lanes)) for s in figures)


def _limited(document: PlanDocument, figures: Sequence[StageFigures], share: int) -> float:
    """The bound on the term A from depths that are smaller than the number of minibatches of a replica."""
    longest = 0.0
    for index, stage in enumerate(figures):
        if stage.depth < math.ceil(share / stage.replicas):
            if document.schedule == GPIPE:
                return math.inf
            longest = max(longest, (share - 1) * _sustained(document, figures, index))
    return longest


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
