"""The time of a batch, from one update to the next, under schedules with a flush.

An independent implementation of docs/cost-model.md, "Flush schedules" and "Virtual stages".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeplan.checker.data_parallel import sharded_figures
from pipeplan.checker.document import GPIPE, INTERLEAVED, ZERO_BUBBLE, PlanDocument
from pipeplan.checker.figures import StageFigures, exposed_update_s
from pipeplan.checker.formulas import ROUNDING, flush_depth
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.virtual_stages import PassTimes, first_device_ends_s, replica_minibatches, stages_of

FILLING = "filling and draining the pipeline"
EXPOSED = "gradient synchronisation"
ORDER = "waiting for other stages between passes"


class Load(NamedTuple):
    """The time for which a resource is busy, in seconds, and the resource's name in plan.json."""

    seconds: float
    name: str


def busiest(loads: Sequence[Load]) -> frozenset[str]:
    """The names of the resources that are busy for the longest time, up to rounding."""
    longest = max((load.seconds for load in loads), default=0.0)
    return frozenset(load.name for load in loads if load.seconds >= longest * (1 - ROUNDING))


@dataclass(frozen=True)
class BatchParts:
    """The parts of the time from one update to the next under a flush, in seconds.

    The field names are those of the JSON object `batch` in plan.json.
    """

    minibatches: int
    """Minibatches per update in one copy of the pipeline."""
    work_s: float
    """Passes of the first minibatch, from the stage that waits for its update up to the slowest resource."""
    transfers_s: float
    """Transfers of the first minibatch from that stage to the slowest resource."""
    steady_s: float
    """Time that the other minibatches add at the slowest resource."""
    exposed_s: float
    """Time from the stage's last backward pass to the end of its update."""
    bound: str
    """The name of the slowest resource in plan.json."""
    order_s: float = 0.0
    """Waiting time that the order of the passes causes, if workers run several stages."""

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return self.work_s + self.transfers_s + self.steady_s + self.exposed_s + self.order_s

    def causes(self, stages: int) -> frozenset[str]:
        """The names of the longest parts. A plan of one stage has no pipeline to fill, so all its passes count as
        compute.
        """
        first = Load(self.work_s + self.transfers_s, FILLING)
        steady = Load(self.steady_s, self.bound)
        passes = [steady, first] if stages > 1 else [Load(steady.seconds + first.seconds, self.bound)]
        return busiest([*passes, Load(self.exposed_s, EXPOSED), Load(self.order_s, ORDER)])


def slowest_batches(
    document: PlanDocument, model: CheckedModel, figures: Sequence[StageFigures]
) -> tuple[BatchParts, ...]:
    """The parts of the longest paths through a batch, for a schedule with a flush: one result for each path of this
    length.
    """
    waits = [exposed_update_s(document, model, figure) for figure in figures]
    found = list(
        _virtual_batches(document, figures, waits) if document.virtual else _batches(document, model, figures, waits)
    )
    longest = max(parts.total_s for parts in found)
    return tuple(parts for parts in found if parts.total_s >= longest * (1 - ROUNDING))


def boundary_name(index: int) -> str:
    """The name in plan.json of the traffic from the stage with this index to the next one."""
    return f"traffic from stage {index + 1} to stage {index + 2}"


def depth_name(index: int) -> str:
    """The name in plan.json of a stage's depth, if it limits the step time."""
    return f"minibatches in flight at stage {index + 1}"


def _batches(
    document: PlanDocument, model: CheckedModel, figures: Sequence[StageFigures], waits: Sequence[float]
) -> Iterator[BatchParts]:
    """Lower bounds on the time of a batch, one for every stage that waits for its update and every resource from this
    stage on.

    Under zb-h1, stages may compute gradients of weights while the pipeline drains. So before the resource, only forward
    passes and half of the transfers count. A stage after the first may have half of a backward pass left, and draining
    may hide the waits of all stages except the first.
    """
    share, split = document.share(document.copies), document.schedule == ZERO_BUBBLE
    divided = sharded_figures(document, model).bound if document.options.divides_weights else ""
    for begin, wait in enumerate(waits):
        way = trip = 0.0
        for index, stage in enumerate(figures[begin : begin + 1] if begin and split else figures[begin:], start=begin):
            forward, backward = stage.halves_s
            late = backward / 2 if split and index > begin else 0.0
            others = (document.rounds(index) - 1) * stage.passes_s
            name = divided or f"compute of stage {index + 1}"
            yield BatchParts(share, way + stage.passes_s - late, trip, others, wait, name)
            mine = forward if split else stage.passes_s
            if index + 1 < len(figures) and not document.options.contention:
                messages = math.ceil(share / stage.lanes) * stage.busier_s
                yield BatchParts(share, way + mine, trip, messages, wait, boundary_name(index))
            way, trip = way + mine, trip + stage.round_trip_s / (2 if split else 1)
    for index, (stage, following) in enumerate(itertools.pairwise(figures)):
        demand = following.depth * following.replicas
        if stage.depth < flush_depth(demand, share, stage.replicas, everything=document.schedule == GPIPE):
            yield BatchParts(share, 0.0, 0.0, math.inf, 0.0, depth_name(index))


def _virtual_batches(
    document: PlanDocument, figures: Sequence[StageFigures], waits: Sequence[float]
) -> Iterator[BatchParts]:
    """Lower bounds on the time of a batch: one for every device, stage and boundary, and one from the order of the
    passes.

    `waits` are the times of the stages' updates.
    """
    devices = [_of_device(document, figures, device) for device in range(len(document.devices))]
    yield from devices
    yield from _of_stages(document, figures, waits)
    longest = max(parts.total_s for parts in devices)
    ordered = first_device_ends_s(document, [_pass_times(document, figures, index) for index in range(len(figures))])
    for parts in devices:
        if ordered is None or parts.total_s < longest * (1 - ROUNDING):
            continue
        for end, wait in zip(ordered, (waits[0], 0.0), strict=True):
            if end >= parts.total_s * (1 - ROUNDING):
                own, extra = (parts.work_s, parts.transfers_s, parts.steady_s), max(0.0, end - parts.total_s)
                yield BatchParts(parts.minibatches, *own, wait, parts.bound, extra)


def _of_device(document: PlanDocument, figures: Sequence[StageFigures], device: int) -> BatchParts:
    """The work of a device for all its minibatches.

    With whole backward passes, the work begins when the first minibatch has passed all stages before the device's first
    stage, and the last gradient returns through the same stages.
    """
    own = stages_of(document, device)
    work = sum(figures[index].passes_s for index in own)
    before = figures[: own[0]] if document.schedule == INTERLEAVED else ()
    path, messages = sum(one.passes_s for one in before), sum(one.round_trip_s for one in before)
    *others, last = [str(index + 1) for index in own]
    name = f"compute of the workers of stages {', '.join(others)} and {last}" if others else f"compute of stage {last}"
    steady = (replica_minibatches(document) - 1) * work
    return BatchParts(document.minibatches, work + path, messages, steady, 0.0, name)


def _of_stages(document: PlanDocument, figures: Sequence[StageFigures], waits: Sequence[float]) -> Iterator[BatchParts]:
    """The work and the update of every stage and, if cards are not charged, the boundaries between devices."""
    minibatches, rounds = document.minibatches, replica_minibatches(document)
    for index, (stage, wait) in enumerate(zip(figures, waits, strict=True)):
        name = f"compute of stage {index + 1}"
        yield BatchParts(minibatches, stage.passes_s, 0.0, (rounds - 1) * stage.passes_s, wait, name)
        if _follows(document, index) and not document.options.contention:
            busy = math.ceil(minibatches / stage.lanes) * stage.busier_s
            yield BatchParts(minibatches, 0.0, 0.0, busy, 0.0, boundary_name(index))


def _follows(document: PlanDocument, index: int) -> bool:
    """Whether the next stage is on other workers."""
    return index + 1 < len(document.stages) and document.stages[index].workers != document.stages[index + 1].workers


def _pass_times(document: PlanDocument, figures: Sequence[StageFigures], index: int) -> PassTimes:
    stage = figures[index]
    forward, backward = stage.halves_s
    latency = stage.transfer_s - stage.busier_s
    sends = (stage.send_s + latency, stage.return_s + latency) if _follows(document, index) else (0.0, 0.0)
    return PassTimes(forward, backward - stage.weights_s, stage.weights_s, *sends)
