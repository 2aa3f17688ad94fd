"""Plans whose workers run several stages each: the places of stages, the passes of workers, memory and time.

A *device* is a position in the pipeline, filled by the replicas that run the same stages. The executor's own code gives
the order of a device's passes. This module computes all sums without the planner's code (docs/cost-model.md, "Virtual
stages").
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.checker.document import INTERLEAVED, PlanDocument
from pipeplan.checker.formulas import ROUNDING
from pipeplan.checker.model import CheckedModel
from pipeplan.errors import InputError
from pipeplan_launch.plan.virtual_stages import interleaved_passes, zero_bubble_v_passes

MOST_PASSES = 300_000
"""From this number of passes in an update, the planner leaves out the cost of their order."""
MOST_STAGES = 6
"""Largest number of stages of a worker that the planner tries, if the user does not give the number."""


@dataclass(frozen=True)
class DevicePass:
    """One pass of a device."""

    kind: str
    """F (forward), B (backward), or W (gradients of the weights, if they are separate)."""
    stage: int
    minibatch: int


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the passes of one stage, and of a message to the next stage or back; 0 inside a worker."""

    forward_s: float
    backward_s: float
    """The backward pass without `weights_s`."""
    weights_s: float
    send_s: float
    return_s: float


def check_devices(document: PlanDocument) -> None:
    """Raise an `InputError` unless the stages are on the workers that their schedule requires."""
    devices, stages = document.devices, len(document.stages)
    name, count = document.schedule, len(devices)
    if document.copies > 1 or len({len(workers) for workers in devices}) > 1:
        raise InputError(f"under {name} all stages have as many replicas, in one pipeline")
    if stages % count or (name != INTERLEAVED and stages != 2 * count):
        wanted = "as many stages" if name == INTERLEAVED else "two stages"
        raise InputError(f"under {name} every worker runs {wanted}: {stages} stages on {count} devices")
    for index, stage in enumerate(document.stages):
        if stage.workers != devices[_device_of(document, index)]:
            raise InputError(f"under {name} stage {index + 1} belongs on other workers")


def _device_of(document: PlanDocument, stage: int) -> int:
    """The device of a stage, in the looped or the v-shaped placement."""
    count = len(document.devices)
    return stage % count if document.schedule == INTERLEAVED else min(stage, 2 * count - 1 - stage)


def stages_of(document: PlanDocument, device: int) -> list[int]:
    """The stages of a device, in increasing order."""
    return [index for index in range(len(document.stages)) if _device_of(document, index) == device]


def device_passes(document: PlanDocument, device: int) -> list[DevicePass]:
    """The passes of a device for one update, in the executor's order."""
    own = stages_of(document, device)
    order = interleaved_passes if document.schedule == INTERLEAVED else zero_bubble_v_passes
    passes = order(device, len(document.devices), len(own), replica_minibatches(document))
    return [DevicePass(kind, own[place], minibatch) for kind, place, minibatch in passes]


def replica_minibatches(document: PlanDocument) -> int:
    """Minibatches of one update on the replica with the most."""
    return math.ceil(document.minibatches / len(document.devices[0]))


def check_held(document: PlanDocument) -> None:
    """Check the stated numbers of minibatches in flight and of deferred passes of every stage."""
    for device in range(len(document.devices)):
        passes = device_passes(document, device)
        for index in stages_of(document, device):
            stage, splits = document.stages[index], document.schedule != INTERLEAVED
            flying = _most(passes, index, "F", "B")
            deferred = _most(passes, index, "B", "W") if splits else 0
            if (stage.depth, stage.deferred) != (flying, deferred):
                raise InputError(
                    f"stage {index + 1} has {flying} minibatches in flight and defers {deferred}, and the plan says "
                    f"{stage.depth} and {stage.deferred}"
                )


def _most(passes: Sequence[DevicePass], stage: int, first: str, second: str) -> int:
    """The largest number of a stage's minibatches that are between two passes."""
    now = most = 0
    for one in passes:
        if one.stage == stage:
            now += (one.kind == first) - (one.kind == second)
            most = max(most, now)
    return most


def activation_bytes(document: PlanDocument, device: int, sizes: Sequence[float]) -> float:
    """The largest number of bytes that minibatches in flight take on a device. `sizes`: bytes of one minibatch, by
    stage.

    A stage that recomputes, and any stage under interleaved-1f1b, frees a minibatch after B. Any other stage keeps it
    until W. From B to W it also keeps the gradients of the layers' outputs, which take at most the same memory.
    """
    apart = [document.schedule != INTERLEAVED and not stage.recompute for stage in document.stages]
    held = most = 0.0
    for one in device_passes(document, device):
        change = {"F": 1, "B": 1 if apart[one.stage] else -1, "W": -2 if apart[one.stage] else 0}[one.kind]
        held += change * sizes[one.stage]
        most = max(most, held)
    return most


def first_device_ends_s(document: PlanDocument, times: Sequence[PassTimes]) -> tuple[float, float] | None:
    """(seconds from the first pass of an update to the last pass of the first stage, and to the last pass of its
    device), by the longest paths through passes and messages.

    None if there are too many passes. Raises an `InputError` if the order has a deadlock.
    """
    if 3 * len(times) * replica_minibatches(document) > MOST_PASSES:
        return None
    queues = [deque(device_passes(document, device)) for device in range(len(document.devices))]
    clocks = [0.0] * len(queues)
    ends: dict[DevicePass, float] = {}
    while any(queues):
        moved = False
        for device, queue in enumerate(queues):
            while queue and (ready := _arrival(queue[0], ends, times)) is not None:
                one, moved = queue.popleft(), True
                own = times[one.stage]
                took = {"F": own.forward_s, "B": own.backward_s, "W": own.weights_s}[one.kind]
                clocks[device] = ends[one] = max(clocks[device], ready) + took
        if not moved:
            raise InputError("the passes of the workers wait for each other")
    return max(end for one, end in ends.items() if one.stage == 0), clocks[0]


def _arrival(one: DevicePass, ends: dict[DevicePass, float], times: Sequence[PassTimes]) -> float | None:
    """The time at which the input of a pass arrives; None if the pass that makes it has not run."""
    if one.kind == "W" or (one.kind == "F" and one.stage == 0) or (one.kind == "B" and one.stage == len(times) - 1):
        return 0.0
    source = one.stage - 1 if one.kind == "F" else one.stage + 1
    end = ends.get(DevicePass(one.kind, source, one.minibatch))
    if end is None:
        return None
    between = times[min(source, one.stage)]
    return end + (between.send_s if one.kind == "F" else between.return_s)


def check_bound(document: PlanDocument, model: CheckedModel, bound_s: float) -> None:
    """Raise an `InputError` if some number of devices and replicas allows a step time below the stated bound.

    The step time counts only the replica with the most minibatches, on the fastest device. For each minibatch it runs
    an equal share of all work, or the largest block of layers.
    """
    fastest = max(device.speed for device in document.cluster.devices)
    work = (model.forward_s + model.backward_s + model.update_s) / fastest
    work_s = float(work.sum())
    largest_s = float((model.members(list(model.blocks)).astype(float) @ work).max())
    workers, accumulate, options = document.cluster.workers, document.minibatches, document.options
    most = min(workers, options.max_workers or workers)
    least = min(
        (
            math.ceil(accumulate / replicas) * max(work_s / devices, largest_s) / accumulate
            for devices in range(2 if workers > 1 else 1, most + 1)
            if _have_stages(document, devices, len(model.blocks))
            for replicas in range(1, min(most // devices, options.max_replicas or most, accumulate) + 1)
        ),
        default=0.0,
    )
    if bound_s > least * (1 + ROUNDING):
        raise InputError(f"bound_s: stated {bound_s!r}, but the work alone allows {least!r}")


def _have_stages(document: PlanDocument, devices: int, blocks: int) -> bool:
    """Whether this number of devices can have the number of stages that the options and the schedule require."""
    options = document.options
    most = min(blocks, options.stages or blocks, options.max_stages or blocks)
    counts = range(2, 3 if document.schedule != INTERLEAVED else MOST_STAGES + 1)
    if options.virtual_stages is not None:
        counts = range(options.virtual_stages, options.virtual_stages + 1)
    return any(devices * count <= most and options.stages in (None, devices * count) for count in counts)
