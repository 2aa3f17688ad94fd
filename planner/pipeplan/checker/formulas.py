"""The formulas of docs/cost-model.md, each written once, for the stages of a plan and for all stages of a certificate.

These formulas share no code with `pipeplan.cost`. All of them accept scalars or NumPy arrays. Times are in seconds,
sizes in bytes, bandwidths in bytes/s. The two cuts around a stage, as indices into `Totals`, stand for the stage.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.document import PlanDocument
from pipeplan.checker.model import CheckedModel, Floats, Totals
from pipeplan.cluster_data.cluster import Cluster, Device

ROUNDING = 1e-9
"""A quotient that exceeds an integer by less than this counts as the integer, as in the planner."""


# -- exchanges of gradients --


def ring_allreduce_s(members: Any, size: Any, bandwidth: Any, latency_s: Any) -> Any:
    """Time of one ring all-reduce: 2 (m-1)/m · size / B + 2 (m-1) α."""
    steps = 2.0 * (members - 1)
    return steps * (size / (members * bandwidth) + latency_s)


def gradient_exchange_s(document: PlanDocument, members: Any, size: Any, bandwidth: Any, latency_s: Any) -> Any:
    """Time in which replicas compute the mean of their gradients.

    If each replica updates only a part of the weights, the replicas then gather the weights, which takes half as many
    steps as the ring all-reduce.
    """
    return ring_allreduce_s(members, size, bandwidth, latency_s) * (1.5 if document.options.shard_optimizer else 1.0)


def hop_bytes(document: PlanDocument, members: Any, size: Any) -> Any:
    """Bytes that one member of a ring sends to the next member in an all-reduce of `size` bytes, and in gathering
    weights.
    """
    return (3 if document.options.shard_optimizer else 2) * (members - 1) / members * size


def shared_weight_s(document: PlanDocument, size: Any) -> Any:
    """The charge of a stage for exchanging the gradients of a weight that it shares with other stages; 0 if `size` is
    0.
    """
    count = document.cluster.workers
    link = document.network.among(list(range(count)))
    return np.where(np.asarray(size) > 0, size / link.allreduce + count * link.latency_s, 0.0)


def overlapped_s(compute_s: Any, synchronisation_s: Any, overlap: float) -> Any:
    """Time of compute c and synchronisation g with overlap ω: max(c, g) + (1-ω) min(c, g)."""
    longer, shorter = np.maximum(compute_s, synchronisation_s), np.minimum(compute_s, synchronisation_s)
    return longer + (1.0 - overlap) * shorter


def update_wait_s(
    document: PlanDocument, model: CheckedModel, group_s: Any, backward_s: Any, shared_s: Any, step_s: Any
) -> Any:
    """Shortest time from a stage's last backward pass to the end of its update, with a flush.

    The all-reduce of all replicas overlaps with that pass as far as the option `overlap` allows, unless the stage
    shares weights or its replicas divide the optimiser's state. `shared_s`: time of the exchange of shared weights,
    with at least one more stage. `step_s`: the optimiser's step per minibatch; here the whole step counts.
    """
    hidden = 0.0 if document.options.shard_optimizer or model.shares else document.options.overlap
    return group_s - hidden * np.minimum(group_s, backward_s) + 2.0 * shared_s + step_s * document.minibatches


# -- minibatches in flight --


def group_wait(allreduce_s: Any, step_time_s: float, replicas: Any, copies: int) -> Any:
    """Number of minibatches that pass while replicas wait for an all-reduce: max(0, G/T - 1), or r - 1/m with m
    copies.
    """
    if copies > 1:
        return replicas - 1.0 / copies
    return np.maximum(0.0, allreduce_s / step_time_s - 1.0)


def in_flight_depth(demand: Any, waiting: Any, transfer_s: Any, step_time_s: float, replicas: Any) -> Any:
    """In-flight depth: 1 + ⌈(demand + wait + 2 x / T) / r⌉, with demand = d′ r′ + wait′ of the next stage."""
    return 1.0 + np.ceil((demand + waiting + 2.0 * transfer_s / step_time_s) / replicas - ROUNDING)


def flush_depth(demand: Any, minibatches: int, replicas: Any, *, everything: bool) -> Any:
    """The fewest minibatches in flight under a flush: enough for the d′ r′ of the next stage, and no more than a
    replica has.

    `everything`: whether a replica holds all its minibatches, as under GPipe.
    """
    most = np.ceil(minibatches / replicas)
    return most if everything else np.minimum(most, in_flight_depth(demand, 0.0, 0.0, 1.0, replicas))


# -- work and memory of a stage --


def executor_work_s(document: PlanDocument, totals: Totals, cut: int, before: NDArray[np.intp]) -> Floats:
    """The executor's work for one minibatch, at the stages from each of the cuts `before` to `cut`.

    The time is for a device of speed 1, in seconds.
    """
    costs, last = document.cluster.executor, cut + 1 == len(totals.cuts)
    neighbours = (before > 0).astype(int) + (not last)
    crossing = totals.crossing[before] + totals.crossing[cut]
    passes = 1 if document.inference else 2
    updates = 0.0 if document.inference else 1 / (document.minibatches if document.accumulates else 1)
    # Weight versions are copied after every update; under 2BW that is once for all minibatches of the update.
    often = 0.0 if document.inference or document.flushes or last else updates
    copy_byte_s = costs.version_byte_s + (costs.correction_byte_s if document.options.correction == "ef" else 0.0)
    time = passes * costs.pass_s + updates * costs.step_s + neighbours * (passes * costs.message_s)
    time = time + np.where(neighbours == 2, 0.0, costs.read_s + costs.sample_s)
    return np.asarray(time + crossing * costs.message_byte_s + totals.weights(cut, before) * often * copy_byte_s)


def stage_memory(
    document: PlanDocument,
    model: CheckedModel,
    totals: Totals,
    cut: int,
    before: NDArray[np.intp],
    *,
    replicas: Any,
    kept: Any,
    each: bool,
    again: bool,
) -> tuple[Floats, Floats]:
    """Memory of one worker of stages from the cuts `before` to `cut`: (fixed bytes, bytes per minibatch in flight).

    `replicas`: their number in all copies. `kept`: number of weight versions that workers keep. `each`: whether they
    keep one more for each minibatch in flight. `again`: whether the stage recomputes. The workspace, which is the
    largest of any layer, is not included.
    """
    weights = totals.weights(cut, before)
    fixed = totals.buffers[cut] - totals.buffers[before] + totals.crossing[cut] + totals.crossing[before] + weights
    if not model.training:
        return fixed, np.zeros(len(before))
    state = model.state_ratio / (replicas if document.options.shard_optimizer else 1)
    # In addition to the optimiser's state and the buckets of an all-reduce, a correction keeps one step of the
    # optimiser for each version except one.
    corrected = 1 + model.corrects
    fixed = fixed + weights * (state + (replicas > 1) + corrected * kept - model.corrects)
    growing = totals.sent[before] + weights * corrected * each
    once = totals.saved[cut] - totals.saved[before] + totals.sent[cut]
    return (fixed + once, growing) if again else (fixed, growing + once)


def worker_bytes(cluster: Cluster, stage_bytes: float) -> float:
    """Memory of a worker, in bytes: of the stage, of the allocator in proportion, and of the worker itself."""
    costs = cluster.executor
    return stage_bytes + stage_bytes * costs.allocator_share + costs.worker_bytes


def usable_of(device: Device) -> float:
    """Bytes of a device that a worker may use: everything except the reserve, in whole bytes."""
    return math.ceil(device.memory_bytes - device.memory_reserve * device.memory_bytes)


def room_of(cluster: Cluster, device: Device) -> float:
    """Largest size of a stage, in bytes, for which `worker_bytes` fits on this device."""
    costs = cluster.executor
    return (usable_of(device) - costs.worker_bytes) / (costs.allocator_share + 1)


def core_busy_s(document: PlanDocument, passes_s: Any, group_s: Any, replicas: Any) -> Any:
    """Seconds for which a minibatch keeps a core busy, for each of the stage's replicas in all copies.

    With a flush, the part of an all-reduce that no pass hides counts in the batch instead.
    """
    exposed = group_s * (1.0 - document.options.overlap) * (not document.flushes)
    return passes_s / replicas + exposed / (document.minibatches if document.accumulates else replicas)
