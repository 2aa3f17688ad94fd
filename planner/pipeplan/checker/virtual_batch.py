"""The time of a batch where workers run several stages, implemented independently from docs/cost-model.md.

It is that of the device that needs longest, and what waiting for other stages between passes adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pipeplan.checker.document import INTERLEAVED, PlanDocument
from pipeplan.checker.figures import ROUNDING, StageFigures
from pipeplan.checker.loads import BatchParts, Load, boundary_name
from pipeplan.checker.virtual_stages import PassTimes, replica_minibatches, stages_of, update_s


class DeviceTime(NamedTuple):
    """The least time of a batch that a device allows, in seconds, and its parts."""

    seconds: float
    work_s: float
    """Its own work for one minibatch."""
    path_s: float
    """Passes of the stages before its first one, for one minibatch."""
    messages_s: float
    """Messages on that way."""
    device: int


def _slowest_device(document: PlanDocument, figures: Sequence[StageFigures]) -> DeviceTime:
    """The device that needs longest for a batch.

    It has all its minibatches' work, after the first one has come through all stages before its first. Its last
    gradient goes back through these, but under zb-v, where gradients of weights fill that time.
    """
    times, back = [], document.schedule == INTERLEAVED
    for device in range(len(document.devices)):
        own = stages_of(document, device)
        work, before = sum(figures[index].pass_s for index in own), figures[: own[0]]
        path = sum(one.pass_s if back else one.forward_s + one.executor_s / 2 for one in before)
        messages = sum(one.round_trip_s if back else one.transfer_s for one in before)
        total = replica_minibatches(document) * work + path + messages
        times.append(DeviceTime(total, work, path, messages, device))
    return max(times)


def virtual_batch(document: PlanDocument, figures: Sequence[StageFigures], fastest: float) -> BatchParts:
    """The parts of a batch where workers run several stages: those of the slowest device, and waiting."""
    slowest = _slowest_device(document, figures)
    steady = max(load.seconds for load in _loads(document, figures, slowest))
    known = max(slowest.seconds, steady + slowest.work_s + slowest.path_s + slowest.messages_s)
    ordered = update_s(document, [_pass_times(document, figures, index) for index in range(len(figures))])
    waits = ordered is not None and ordered > known * (1 + ROUNDING)
    return BatchParts(
        minibatches=document.accumulate or 1,
        work_s=slowest.work_s + slowest.path_s,
        transfers_s=slowest.messages_s,
        steady_s=steady,
        exposed_s=max(stage.exposed_s(fastest) for stage in figures),
        copies_s=0.0,
        shared_weights_s=0.0,
        order_s=(ordered or 0.0) - known if waits else 0.0,
    )


def _loads(document: PlanDocument, figures: Sequence[StageFigures], slowest: DeviceTime) -> list[Load]:
    """The loads that may limit the steady part of a batch: the slowest device, and the boundaries between devices."""
    *others, last = [str(index + 1) for index in stages_of(document, slowest.device)]
    name = f"the workers of stages {', '.join(others)} and {last}" if others else f"stage {last}"
    loads = [Load((replica_minibatches(document) - 1) * slowest.work_s, f"compute of {name}")]
    for index, stage in enumerate(figures[:-1]):
        if document.stages[index].workers != document.stages[index + 1].workers:
            rounds = math.ceil((document.accumulate or 1) / stage.lanes)
            loads.append(Load((rounds - 1) * stage.busier_s, boundary_name(index)))
    return loads


def _pass_times(document: PlanDocument, figures: Sequence[StageFigures], index: int) -> PassTimes:
    stage = figures[index]
    follows = index + 1 < len(figures) and document.stages[index].workers != document.stages[index + 1].workers
    backward = stage.backward_s + stage.update_s + stage.executor_s / 2 - stage.weights_s
    return PassTimes(
        stage.forward_s + stage.executor_s / 2, backward, stage.weights_s, stage.transfer_s if follows else 0.0
    )


def virtual_loads(document: PlanDocument, figures: Sequence[StageFigures]) -> list[Load]:
    """The loads that may limit the steady part of a batch."""
    return _loads(document, figures, _slowest_device(document, figures))
