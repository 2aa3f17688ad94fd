"""The time of a batch where workers run several stages, implemented independently from docs/cost-model.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipeplan.checker.document import INTERLEAVED, PlanDocument
from pipeplan.checker.figures import ROUNDING, StageFigures
from pipeplan.checker.loads import BatchParts, boundary_name
from pipeplan.checker.virtual_stages import PassTimes, first_device_ends_s, replica_minibatches, stages_of


def virtual_batches(
    document: PlanDocument, figures: Sequence[StageFigures], waits: Sequence[float]
) -> Iterator[BatchParts]:
    """The least time of a batch by every device, stage and boundary, and by the order of the passes.

    `waits` are the times of the stages' updates.
    """
    devices = [_of_device(document, figures, device) for device in range(len(document.devices))]
    yield from devices
    yield from _of_stages(document, figures, waits)
    slowest = max(devices, key=lambda parts: parts.total_s)
    ordered = first_device_ends_s(document, [_pass_times(document, figures, index) for index in range(len(figures))])
    if ordered is None:
        return
    for parts in devices:
        if parts.total_s < slowest.total_s * (1 - ROUNDING):
            continue
        for end, wait in zip(ordered, (waits[0], 0.0), strict=True):
            if end >= parts.total_s * (1 - ROUNDING):
                own, extra = (parts.work_s, parts.transfers_s, parts.steady_s), max(0.0, end - parts.total_s)
                yield BatchParts(parts.minibatches, *own, wait, parts.bound, extra)


def _of_device(document: PlanDocument, figures: Sequence[StageFigures], device: int) -> BatchParts:
    """The work of a device for all its minibatches.

    With whole backward passes it begins when the first minibatch has come through all stages before its first one, and
    the last gradient goes back through these.
    """
    own = stages_of(document, device)
    work = sum(figures[index].passes_s for index in own)
    before = figures[: own[0]] if document.schedule == INTERLEAVED else ()
    path, messages = sum(one.passes_s for one in before), sum(one.round_trip_s for one in before)
    *others, last = [str(index + 1) for index in own]
    name = f"compute of the workers of stages {', '.join(others)} and {last}" if others else f"compute of stage {last}"
    steady = (replica_minibatches(document) - 1) * work
    return BatchParts(document.accumulate or 1, work + path, messages, steady, 0.0, name)


def _of_stages(document: PlanDocument, figures: Sequence[StageFigures], waits: Sequence[float]) -> Iterator[BatchParts]:
    """The work and the update of every stage, and the boundaries between devices where no cards are charged."""
    minibatches, rounds = document.accumulate or 1, replica_minibatches(document)
    for index, (stage, wait) in enumerate(zip(figures, waits, strict=True)):
        name = f"compute of stage {index + 1}"
        yield BatchParts(minibatches, stage.passes_s, 0.0, (rounds - 1) * stage.passes_s, wait, name)
        if _follows(document, index) and not document.options.contention:
            busy = math.ceil(minibatches / stage.lanes) * stage.busier_s
            yield BatchParts(minibatches, 0.0, 0.0, busy, 0.0, boundary_name(index))


def _follows(document: PlanDocument, index: int) -> bool:
    """Whether a stage is followed by one on other workers."""
    return index + 1 < len(document.stages) and document.stages[index].workers != document.stages[index + 1].workers


def _pass_times(document: PlanDocument, figures: Sequence[StageFigures], index: int) -> PassTimes:
    stage = figures[index]
    forward, backward = stage.halves_s
    latency = stage.transfer_s - stage.busier_s
    sends = (stage.send_s + latency, stage.return_s + latency) if _follows(document, index) else (0.0, 0.0)
    return PassTimes(forward, backward - stage.weights_s, stage.weights_s, *sends)
