"""Contention for shared resources: network cards of servers, ports of workers, and cores of servers.

The formulas of `cost` charge every transfer and every all-reduce as if no other traffic shared its links. Here each
component of each level (a worker at level 0, a server at level 1, …) has one full-duplex card to the level above it.
One direction of the card carries all traffic that leaves the component, the other all traffic that enters it.
docs/cost-model.md lists the limits of this model.

Boundary between stages. Minibatch i goes from senders[i mod r] to receivers[i mod r'], and its gradient goes back.
If p ≡ q modulo g = gcd(r, r'), sender p and receiver q exchange one of every lcm(r, r') minibatches. A component that
has n(ρ) senders p and m(ρ) receivers q with p mod g = q mod g = ρ sends this share of the minibatches to others:

    ( Σ n(ρ) r'/g - Σ n(ρ) m(ρ) ) / lcm(r, r')

With n and m exchanged, the same expression gives the share that the component receives. Interleaved copies of a
pipeline need no further term, because g is then a multiple of the number of copies.

Ring all-reduce. The ring joins the replicas in their order, and the last to the first. Each hop carries 2 (r-1)/r of
the bytes per all-reduce (Patarasuk and Yuan, JPDC 2009). The all-reduce among m copies consists of r rings of m
members, one ring for each replica. Each ring carries an equal part of the bytes.

Cores. If a server has more workers than cores (`Device.cores`), the cores share the compute time of all its workers
evenly: no core is idle while a worker waits for a core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.stage_times import group_allreduce_time, parameter_bytes_of, stage_times
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import ACCUMULATING, FLUSHING
from pipeplan.problem.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OUTGOING, INCOMING = 0, 1
"""Indices of the two directions of a card."""


@dataclass(frozen=True)
class CardLoads:
    """Busy time of each card and of each server's cores, in seconds per minibatch of the whole pipeline."""

    cluster: Cluster
    busy_s: tuple[Floats, ...]
    """One array for each level below the outermost, beginning with the workers' ports (level 0). Each array has the
    shape (2, components), with outgoing traffic before incoming."""
    cores_s: tuple[tuple[float, str], ...] = ()
    """(busy seconds of the cores, name of the cores in messages) for each server whose workers share cores."""

    def busiest(self) -> tuple[float, str]:
        """The longest busy time and the name of its resource.

        Among equal times the outermost level comes first, then the first component.
        """
        level = max(range(len(self.busy_s)), key=lambda k: (float(self.busy_s[k].max()), k))
        times = self.busy_s[level]
        direction, component = (int(index) for index in np.unravel_index(int(times.argmax()), times.shape))
        card = float(times[direction, component]), self._name(level, component, direction)
        return max(card, *self.cores_s, key=lambda entry: entry[0]) if self.cores_s else card

    def _name(self, level: int, component: int, direction: int) -> str:
        way = "outgoing" if direction == OUTGOING else "incoming"
        if level == 0:
            return f"port of worker {component}, {way}"
        return f"network card of {self.cluster.levels[level - 1].name} {component}, {way}"


def card_loads(plan: Plan, problem: Problem, links: Links) -> CardLoads:
    """The load of every card under a plan. The run time grows only with the numbers of workers, stages and levels."""
    cluster = problem.cluster
    parameters, forward, backward = _stage_bytes(plan, problem)
    busy = []
    for level in range(len(cluster.levels)):
        firsts = np.array(cluster.starts(level))
        messages, rings = bytes_across_cards(plan, cluster, level, (parameters, forward, backward), problem.training)
        send, reduce = np.array(
            [links.card(level, int(worker)) for worker in (firsts[:1] if cluster.uniform else firsts[:-1])]
        ).T
        busy.append(messages / send + rings / reduce)
    return CardLoads(cluster, tuple(busy), _core_loads(plan, problem, links))


def bytes_across_cards(
    plan: Plan, cluster: Cluster, level: int, sizes: tuple[Floats, Floats, Floats], training: bool
) -> tuple[Floats, Floats]:
    """Bytes per minibatch across the cards of a level: (bytes of messages, bytes of all-reduces).

    Both are arrays of shape (direction, component).

    `sizes` gives for each stage the bytes of its parameters, and the bytes of one minibatch that cross the cut behind
    it forward and backward.
    """
    parameters, forward, backward = sizes
    firsts = np.array(cluster.starts(level))
    homes = [np.searchsorted(firsts, stage.workers, side="right") - 1 for stage in plan.stages]
    messages, rings = np.zeros((2, len(firsts) - 1)), np.zeros((2, len(firsts) - 1))
    for index, stage in enumerate(plan.stages):
        if training and plan.schedule not in FLUSHING:
            _add_rings(rings, homes[index], plan, stage, parameters[index])
        if index + 1 < len(plan.stages):
            _add_boundary(messages, homes[index], homes[index + 1], forward[index], backward[index])
    return messages, rings


def least_step_time_of_shared_cores_s(problem: Problem) -> float:
    """Lower bound on every plan's step time from shared cores, in seconds per minibatch.

    The bound divides all compute among all cores. It is 0 if no cores are shared or contention is not charged.
    """
    cluster = problem.cluster
    if not cluster.shared_cores or not problem.options.contention:
        return 0.0
    idle = sum((stop - first - cores) * cluster.device_of(first).speed for first, stop, cores in cluster.shared_cores)
    return problem.work_s / (cluster.total_speed - idle)


def _core_loads(plan: Plan, problem: Problem, links: Links) -> tuple[tuple[float, str], ...]:
    """(busy seconds of the cores per minibatch, name of the cores) for each server with more workers than cores."""
    cluster, loads = problem.cluster, []
    shared = cluster.shared_cores
    if not shared:
        return ()
    times = [_core_time_of_replica(plan, problem, links, index) for index in range(len(plan.stages))]
    for first, stop, cores in shared:
        inside = [sum(first <= worker < stop for worker in stage.workers) for stage in plan.stages]
        total = math.fsum(count * time for count, time in zip(inside, times, strict=True))
        loads.append((total / cores, f"the {cores:g} cores of server {cluster.server_of(first)}"))
    return tuple(loads)


def _core_time_of_replica(plan: Plan, problem: Problem, links: Links, index: int) -> float:
    """Seconds that each replica of a stage computes per minibatch of the whole pipeline."""
    replicas, work_s = plan.stages[index].replicas, stage_times(plan, problem, links, index).pass_s
    interval = (plan.accumulate or 1) if plan.schedule in ACCUMULATING else replicas
    allreduce = 0.0 if plan.schedule in FLUSHING else group_allreduce_time(plan, problem, links, index)
    return float(formulas.core_time(work_s, replicas, allreduce, interval, problem.options.overlap))


def _stage_bytes(plan: Plan, problem: Problem) -> tuple[Floats, Floats, Floats]:
    """For every stage: bytes of its parameters, and bytes that cross the cut behind it forward and backward.

    A tensor counts once for each cut that it crosses.
    """
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    home = [stage_of[unit.layers[0]] for unit in problem.units]
    parameters = np.array([float(parameter_bytes_of(plan, problem, index)) for index in range(len(plan.stages))])
    forward, backward = problem.flow_arrays.crossing(np.array(home), len(plan.stages)).T
    return parameters, forward, backward


def _add_boundary(total: Floats, senders: Ints, receivers: Ints, forward: float, backward: float) -> None:
    """Add the traffic of one minibatch between two stages to the cards of the stages' components."""
    common = math.gcd(len(senders), len(receivers))
    lowest = int(min(senders.min(), receivers.min()))
    count = int(max(senders.max(), receivers.max())) - lowest + 1
    inside: Ints | Floats = np.zeros(count)
    if senders.max() >= receivers.min() and receivers.max() >= senders.min():
        # A class is (component, position modulo g). Traffic stays inside a component only for classes with both ends
        # there.
        sender_classes, receiver_classes = (_classes(homes - lowest, common) for homes in (senders, receivers))
        common_classes, at_sender, at_receiver = np.intersect1d(
            sender_classes[0], receiver_classes[0], assume_unique=True, return_indices=True
        )
        inside = np.bincount(
            common_classes // common, sender_classes[1][at_sender] * receiver_classes[1][at_receiver], count
        )
    leaving = np.bincount(senders - lowest, minlength=count) * (len(receivers) // common) - inside
    entering = np.bincount(receivers - lowest, minlength=count) * (len(senders) // common) - inside
    period = math.lcm(len(senders), len(receivers))
    part = total[:, lowest : lowest + count]
    part[OUTGOING] += (leaving * forward + entering * backward) / period
    part[INCOMING] += (entering * forward + leaving * backward) / period


def _classes(homes: Ints, common: int) -> tuple[Ints, Ints]:
    """The classes that occur, as component · common + position mod common, and the number of workers in each class."""
    return np.unique(homes * common + np.arange(len(homes)) % common, return_counts=True)


def _add_rings(total: Floats, homes: Ints, plan: Plan, stage: Stage, size: float) -> None:
    """Add the all-reduces of a stage with `size` bytes of gradients, inside each copy and among the copies."""
    copies, replicas = plan.copies, stage.replicas // plan.copies
    grid = homes.reshape(replicas, copies)
    # Minibatches of all copies between two all-reduces: given by the schedule, else the number of replicas or copies.
    common = plan.accumulate if plan.schedule in ACCUMULATING else None
    within, among = common or replicas * copies, common or copies
    for axis, rings, interval in ((0, 1, within), (1, replicas, among)):
        if grid.shape[axis] == 1:
            continue
        following = np.roll(grid, -1, axis=axis)
        hop = float(formulas.ring_allreduce_time(grid.shape[axis], size / rings, 1.0, 0.0)) / interval
        crosses = grid != following
        if crosses.any():
            lowest, count = int(homes.min()), int(homes.max() - homes.min()) + 1
            part = total[:, lowest : lowest + count]
            part[OUTGOING] += np.bincount(grid[crosses] - lowest, minlength=count) * hop
            part[INCOMING] += np.bincount(following[crosses] - lowest, minlength=count) * hop
