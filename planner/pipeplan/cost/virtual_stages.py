"""Time and memory of plans whose workers run several stages each (docs/cost-model.md, "Virtual stages").

A *device* is a position in the pipeline, filled by the replicas that run the same stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.depths import weights_s
from pipeplan.cost.flush import BatchTime, ahead_s, exposed_s, ways_s
from pipeplan.cost.stage_times import PlanStage, StageTimes, minibatches_per_copy, stage_memory
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import INTERLEAVED, SPLITTING, ZERO_BUBBLE_V
from pipeplan.problem.problem import Problem
from pipeplan_launch.plan.virtual_stages import (
    VirtualStages,
    interleaved_passes,
    looped_device,
    most_held,
    v_shaped_device,
    zero_bubble_v_passes,
)

PLACEMENTS = {
    INTERLEAVED: VirtualStages(looped_device, interleaved_passes),
    ZERO_BUBBLE_V: VirtualStages(v_shaped_device, zero_bubble_v_passes, most=2),
}
"""For each schedule, the executor's own functions that place stages on devices and order a device's passes."""

MOST_PASSES = 300_000
"""Largest number of passes per update for which `first_device_done_s` computes the time. It takes a tenth of a second
for 100,000 passes."""


def check_devices(plan: Plan) -> None:
    """Raise an `InputError` unless the workers of the stages are placed as the schedule says."""
    placement, devices = PLACEMENTS[plan.schedule], plan.devices
    if plan.copies > 1 or len({len(workers) for workers in devices}) > 1:
        raise InputError(f"under {plan.schedule} all stages have the same number of replicas, in one pipeline")
    if (refusal := placement.refusal(len(plan.stages), len(devices))) is not None:
        raise InputError(f"under {plan.schedule} {refusal}")
    for index, stage in enumerate(plan.stages):
        if stage.workers != devices[placement.device_of(index, len(devices))]:
            raise InputError(f"under {plan.schedule} stage {index + 1} belongs to other workers")


def with_depths(plan: Plan) -> Plan:
    """The plan with each stage's depth set to the most minibatches in flight at that stage during one update."""
    placement, devices = PLACEMENTS[plan.schedule], len(plan.devices)
    stages = list(plan.stages)
    for device in range(devices):
        own = placement.stages_of(device, devices, len(stages))
        counted = _held(plan.schedule, device, devices, len(own), _own_minibatches(plan))
        for position, index in enumerate(own):
            depth, deferred = counted[position]
            stages[index] = replace(stages[index], depth=depth, deferred=deferred, versions=1)
    return replace(plan, stages=tuple(stages))


def device_memory(plan: Plan, problem: Problem, index: int) -> tuple[float, float]:
    """Memory of one worker of a stage with all stages that it runs, and memory of one minibatch in flight at this
    stage, in bytes."""
    memory, per_minibatch = memory_of_device(plan, problem, plan.stages[index].workers)
    return memory, per_minibatch[index]


def memory_of_device(plan: Plan, problem: Problem, workers: tuple[int, ...]) -> tuple[float, dict[int, float]]:
    """(memory of each of these workers, memory of one minibatch in flight at each of their stages), in bytes."""
    placement, devices = PLACEMENTS[plan.schedule], len(plan.devices)
    device = plan.devices.index(workers)
    own = placement.stages_of(device, devices, len(plan.stages))
    fixed, per_minibatch = zip(*(stage_memory(plan, problem, stage, held=0) for stage in own), strict=True)
    passes = placement.passes(device, devices, len(own), _own_minibatches(plan))
    splits = [plan.schedule in SPLITTING and not plan.stages[stage].recompute for stage in own]
    now = most = 0.0
    for kind, position, _ in passes:
        one = per_minibatch[position]
        if kind == "F":
            now += one
        elif splits[position]:
            # B frees nothing, and adds gradients of layers' outputs, which take at most as much; W frees both.
            now += one if kind == "B" else -2 * one
        elif kind == "B":
            now -= one
        most = max(most, now)
    most += max(PlanStage(problem, plan, stage).workspace for stage in own)
    return problem.cluster.executor.memory_with(sum(fixed) + most), dict(zip(own, per_minibatch, strict=True))


def virtual_batch_time(plan: Plan, problem: Problem, links: Links, times: Sequence[StageTimes]) -> BatchTime:
    """The parts of one batch's time: of the slowest device, stage, link, or path through the passes of all devices.

    A device computes all its minibatches. Under interleaved-1f1b the device also waits while the first minibatch passes
    through the stages before the device's first stage, and while the last gradient returns through these stages. Under
    zb-v, gradients of weights may fill that time, also while the next batch begins. The path ends where the next batch
    begins.
    """
    count = int(formulas.rounds(minibatches_per_copy(plan), plan.stages[0].replicas))
    device = max(_device_times(plan, times, count), key=lambda one: one.total_s)
    passes = [_passes(plan, problem, times, index) for index in range(len(plan.stages))]
    ordered = first_device_done_s(PLACEMENTS[plan.schedule], passes, len(plan.devices), count)
    found = [device, *_stage_bounds(plan, problem, links, times, count)]
    if ordered is not None:
        # The first stage updates after its own passes; the next batch begins after all passes of its device.
        waits = exposed_s(plan, problem, links, times, 0), 0.0
        for done_s, waited in zip(ordered, waits, strict=True):
            if done_s >= device.total_s * (1 - formulas.ROUNDING):
                found.append(replace(device, exposed_s=waited, order_s=max(0.0, done_s - device.total_s)))
    return max(found, key=lambda one: one.total_s)


def _device_times(plan: Plan, times: Sequence[StageTimes], count: int) -> Iterator[BatchTime]:
    """Lower bounds on the time of a batch, one for each device: its work and, if backward passes are whole, its time of
    filling and draining."""
    for workers in plan.devices:
        own = [index for index, stage in enumerate(plan.stages) if stage.workers == workers]
        work = sum(times[index].pass_s - times[index].update_s for index in own)
        before = () if plan.schedule in SPLITTING else times[: own[0]]
        path, ways = sum(ahead_s(plan, one) for one in before), sum(ways_s(plan, one) for one in before)
        name = f"compute of {_name(plan, workers)}"
        yield BatchTime(minibatches_per_copy(plan), work + path, ways, (count - 1) * work, 0.0, name)


def _stage_bounds(
    plan: Plan, problem: Problem, links: Links, times: Sequence[StageTimes], count: int
) -> Iterator[BatchTime]:
    """Lower bounds on the time of a batch: one for each stage with its all-reduce, and one for each boundary between
    devices."""
    minibatches = minibatches_per_copy(plan)
    for index, stage in enumerate(times):
        waited = exposed_s(plan, problem, links, times, index)
        passes = stage.pass_s - stage.update_s
        yield BatchTime(minibatches, passes, 0.0, (count - 1) * passes, waited, f"compute of stage {index + 1}")
        following = index + 1 < len(times) and plan.stages[index + 1].workers != plan.stages[index].workers
        if following and not problem.options.contention:
            busy = float(formulas.flush_busy(max(stage.send_s, stage.return_s), minibatches, stage.links))
            yield BatchTime(minibatches, 0.0, 0.0, busy, 0.0, f"traffic from stage {index + 1} to stage {index + 2}")


def _passes(plan: Plan, problem: Problem, times: Sequence[StageTimes], index: int) -> StagePasses:
    """The passes of a stage as the executor runs them. B and W are one pass where no other worker waits for B."""
    time, apart = times[index], weights_s(plan, problem, index)
    following = index + 1 < len(plan.stages) and plan.stages[index + 1].workers != plan.stages[index].workers
    latency_s = time.transfer_s - max(time.send_s, time.return_s)
    return StagePasses(
        time.forward_s,
        time.backward_s - time.update_s - apart,
        apart,
        time.send_s + latency_s if following else 0.0,
        time.return_s + latency_s if following else 0.0,
    )


def _name(plan: Plan, workers: tuple[int, ...]) -> str:
    own = [str(index + 1) for index, stage in enumerate(plan.stages) if stage.workers == workers]
    return f"the workers of stages {', '.join(own[:-1])} and {own[-1]}" if len(own) > 1 else f"stage {own[0]}"


def _own_minibatches(plan: Plan) -> int:
    """Minibatches of one update on the replica that has the most."""
    assert plan.accumulate is not None
    return -(-plan.accumulate // plan.stages[0].replicas)


@cache
def _held(schedule: str, device: int, devices: int, chunks: int, minibatches: int) -> tuple[tuple[int, int], ...]:
    """For each stage of a device, the most minibatches between F and B, and between B and W."""
    passes = PLACEMENTS[schedule].passes(device, devices, chunks, minibatches)
    counted = most_held(passes, chunks, splits=schedule in SPLITTING)
    return tuple(zip(counted.awaiting, counted.deferred, strict=True))


@dataclass(frozen=True)
class StagePasses:
    """Seconds of the passes of one stage, and of its messages."""

    forward_s: float
    backward_s: float
    """The part of the backward pass that the previous stage waits for."""
    weights_s: float
    """Gradients of the weights; 0 where they are a part of the backward pass."""
    send_s: float = 0.0
    """Time from the end of a forward pass until the next stage has its message."""
    return_s: float = 0.0
    """Time from the end of the next stage's backward pass until this stage has the message."""


def first_device_done_s(
    placement: VirtualStages, stages: Sequence[StagePasses], devices: int, minibatches: int
) -> tuple[float, float] | None:
    """Seconds from the first pass to the last pass of the first stage, and to the last pass of its device.

    Every device runs its passes in the executor's order. A pass starts when the device's previous pass has ended and
    the pass's message has come; each message has a link to itself. The next update begins on the first device, while
    other devices may still compute gradients of weights. The result is None if there are too many passes.
    """
    if 3 * len(stages) * minibatches > MOST_PASSES:
        return None
    last = len(stages) - 1
    forward: list[list[float | None]] = [[None] * minibatches for _ in stages]
    backward: list[list[float | None]] = [[None] * minibatches for _ in stages]
    own = [placement.stages_of(device, devices, len(stages)) for device in range(devices)]
    orders = [list(placement.passes(device, devices, len(own[device]), minibatches)) for device in range(devices)]
    position, free_s, done_s = [0] * devices, [0.0] * devices, 0.0
    waiting = list(range(devices))
    left = sum(map(len, orders))
    while left:
        before = left
        for device in waiting:
            order, now, at = orders[device], free_s[device], position[device]
            while at < len(order):
                kind, chunk, minibatch = order[at]
                stage = own[device][chunk]
                times = stages[stage]
                if kind == "F":
                    ready = 0.0 if stage == 0 else forward[stage - 1][minibatch]
                    if ready is None:
                        break
                    now = max(now, ready + (stages[stage - 1].send_s if stage else 0.0)) + times.forward_s
                    forward[stage][minibatch] = now
                elif kind == "B":
                    ready = 0.0 if stage == last else backward[stage + 1][minibatch]
                    if ready is None:
                        break
                    now = max(now, ready + (times.return_s if stage < last else 0.0)) + times.backward_s
                    backward[stage][minibatch] = now
                else:
                    now += times.weights_s
                done_s = now if stage == 0 else done_s
                at += 1
            left -= at - position[device]
            free_s[device], position[device] = now, at
        assert left < before, "the order of passes comes to a deadlock"
    return done_s, free_s[0]
