"""Says why no plan satisfies the constraints: which layer does not fit, and how much memory would do."""

from __future__ import annotations

from dataclasses import replace

from pipeplan import cost
from pipeplan.cluster import Cluster, Device
from pipeplan.cuts import Cuts
from pipeplan.problem import Problem, Unit
from pipeplan.solvers import dp
from pipeplan.units import show_size

_STEPS = 12


def why_infeasible(problem: Problem, cuts: Cuts) -> str:
    """One line: the layer that is too large for a device on its own, or the memory that would be enough."""
    needed = {unit.layers[0]: _alone(problem, unit) for unit in problem.units}
    largest = max(needed, key=lambda name: needed[name])
    device = max(problem.cluster.devices, key=lambda one: one.memory_bytes)
    capacity = problem.cluster.memory_of(range(problem.cluster.workers))
    if problem.options.memory and needed[largest] > device.memory_bytes:
        missing = needed[largest] - device.memory_bytes
        return (
            f"nothing fits in memory: layer {largest!r} alone needs {show_size(needed[largest])}, "
            f"{show_size(missing)} more than the {show_size(device.memory_bytes)} of a {device.name}; use a smaller "
            "minibatch or larger devices"
        )
    enough = _enough_memory(problem, cuts, capacity) if problem.options.memory else None
    if enough is None:
        return (
            f"no plan satisfies the constraints on {problem.cluster.workers} workers: relax --stages or --max-replicas"
        )
    return (
        f"nothing fits in memory: every layer fits alone, but no plan for {problem.cluster.workers} workers fits in "
        f"{show_size(capacity)} each{'' if problem.cluster.uniform else ' (the smallest; others in proportion)'}; "
        f"{show_size(enough - capacity)} more ({show_size(enough)}) would do, or a smaller minibatch, or more workers"
    )


def _alone(problem: Problem, unit: Unit) -> float:
    """Bytes of a worker that holds this unit only, one minibatch in flight, without communication buffers."""
    ratio, training = problem.profile.optimizer_state_ratio, problem.training
    fixed = cost.fixed_memory(unit.parameter_bytes, unit.buffer_bytes, 0.0, ratio, training)
    return float(fixed + cost.memory_per_depth(unit.parameter_bytes, unit.saved_bytes, 0, 0))


def _enough_memory(problem: Problem, cuts: Cuts, capacity: float) -> float | None:
    """About the smallest memory with which some plan exists (within 2%); None where memory is not the reason.

    It is that of the smallest device, which has `capacity` now; where devices differ, all grow in proportion.
    """

    def feasible(memory: float) -> bool:
        return dp.feasible(problem.within(_with_memory(problem.cluster, memory / capacity)), cuts)

    low, high = capacity, capacity
    for _ in range(40):
        high *= 2
        if feasible(high):
            break
        low = high
    else:
        return None
    for _ in range(_STEPS):
        if high / low < 1.02:
            break
        middle = (low * high) ** 0.5
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return high


def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    def larger(device: Device) -> Device:
        return replace(device, memory_bytes=int(device.memory_bytes * factor))

    machines = tuple(replace(machine, device=larger(machine.device)) for machine in cluster.machines)
    return replace(cluster, device=larger(cluster.device), machines=machines)
