"""Every formula of the cost model, once. All accept scalars or NumPy arrays that broadcast.

Times are seconds, per minibatch in the steady state where nothing else is said, sizes bytes, bandwidths bytes/s.
Source: Narayanan et al., PipeDream, SOSP 2019, §3.1; docs/cost-model.md tells what differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Number = float | NDArray[np.float64]

# Slack in the ceiling of `in_flight_depth`: a quotient that is an integer but for rounding is that integer.
ROUNDING = 1e-9


def compute_time(work_s: Any, replicas: Any, speed: Any) -> Any:
    """Time per minibatch of a stage whose `replicas` take minibatches in turn: work / (replicas · speed)."""
    return work_s / (replicas * speed)


def ring_allreduce_time(members: Any, size: Any, bandwidth: Any, latency_s: Any) -> Any:
    """Ring all-reduce of `size` bytes among `members` (0 for one member).

    2 (m-1)/m · size / bandwidth + 2 (m-1) · latency: every member sends and receives each of m chunks twice, less one.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009.
    """
    return 2 * (members - 1) / members * size / bandwidth + 2 * (members - 1) * latency_s


def synchronisation_time(replicas: Any, size: Any, bandwidth: Any, latency_s: Any) -> Any:
    """Gradient synchronisation per minibatch: one all-reduce for every `replicas` minibatches."""
    return ring_allreduce_time(replicas, size, bandwidth, latency_s) / replicas


def overlapped(compute_s: Any, synchronisation_s: Any, overlap: float) -> Any:
    """Compute and synchronisation together: the longer, and of the shorter the share that does not hide behind it."""
    return np.maximum(compute_s, synchronisation_s) + (1.0 - overlap) * np.minimum(compute_s, synchronisation_s)


def update_share(accumulate: int | None) -> float:
    """How much of an optimiser's step falls to each minibatch that a worker computes, as a part of its backward pass.

    Without `accumulate` a worker computes one minibatch for every update of its stage, whatever the replicas: all of
    it. With it the workers of a stage compute `accumulate` minibatches for one: 1 / accumulate, which is exact without
    replicas.
    """
    return 1.0 if accumulate is None else 1.0 / accumulate


def core_time(work_s: Any, replicas: Any, allreduce_s: Any, interval: Any, overlap: float) -> Any:
    """How long a minibatch of the whole pipeline keeps one replica of a stage computing: work / replicas, and of the
    all-reduce, once for every `interval` minibatches, what does not run beside it: the cores move the data."""
    return work_s / replicas + (1.0 - overlap) * allreduce_s / interval


def backward_time(forward_s: Any, backward_s: Any, recompute: Any) -> Any:
    """The backward pass of a stage, which first runs forward again where the stage recomputes: b + f there, else b."""
    return backward_s + np.where(recompute, forward_s, 0.0)


def boundary_time(size: Any, bandwidth: Any, links: Any = 1) -> Any:
    """How long a minibatch keeps what joins two stages busy in one direction: size / (bandwidth · links).

    `links` is 1, or with `Options.boundary` parallel the smaller of the two stages' replicas, in one copy.
    """
    return size / (bandwidth * links)


def transfer_time(size: Any, bandwidth: Any, latency_s: Any) -> Any:
    """How long one minibatch takes from one stage to the next: size / bandwidth + latency."""
    return size / bandwidth + latency_s


def in_flight_depth(behind: Any, wait: Any, transfer_s: Any, pace_s: float, replicas: Any) -> Any:
    """Minibatches that each replica of a stage holds in flight so that the pipeline keeps `pace_s`.

    1 + ceil((behind + wait + 2 · transfer / pace) / replicas), with `behind` as `in_flight_behind` gives it for the
    next stage and `wait` as `group_wait` gives it for this one. The last stage needs 1. PipeDream's own warm-up count,
    the ratio of the workers from here on to the replicas here, is a lower bound: it leaves out transfers and waits.
    """
    return 1 + np.ceil((behind + wait + 2 * transfer_s / pace_s) / replicas - ROUNDING)


def in_flight_behind(depth: Any, replicas: Any, wait: Any) -> Any:
    """What the stage before must cover: all that is in flight at this one, and this one's wait."""
    return depth * replicas + wait


def group_wait(allreduce_s: Any, pace_s: float, replicas: Any, copies: int = 1) -> Any:
    """Minibatches that go by while the replicas of a stage wait for the last of their group and its all-reduce.

    The members of a group are spread over replicas - 1 paces; the all-reduce takes `allreduce_s` more and is awaited
    replicas paces after the group began: what exceeds that is allreduce / pace - 1. Synchronisation within the pace
    means at most replicas - 1; with copies of the pipeline that bound is taken, replicas - 1 / copies in one copy.
    """
    if copies > 1:
        return replicas - 1.0 / copies
    return np.maximum(0.0, allreduce_s / pace_s - 1.0)


def depth_limited_pace(depth: int, replicas: int, following: float, transfer_s: float, waits: Sequence[float]) -> float:
    """The pace that a depth sustains: `in_flight_depth` solved for the pace, infinite where the depth is too small.

    `following` is what is in flight at the next stage, `waits` the all-reduce times of this stage and of the next. What
    must hold is slack · T ≥ 2 · transfer + Σ max(0, wait - T), one bound for every subset of the waits.
    """
    slack = (depth - 1 + ROUNDING) * replicas - following
    if slack <= 0:
        return float("inf")
    subsets = [subset for count in range(len(waits) + 1) for subset in itertools.combinations(waits, count)]
    return max((2 * transfer_s + sum(subset)) / (slack + len(subset)) for subset in subsets)


def update_lag(replicas: Any, single_stage: Any) -> Any:
    """By how many updates a replicated stage of a pipeline runs late: 1, as its all-reduce is awaited one later.

    A stage without replicas has nothing to await, and plain data parallelism stays synchronous: 0.
    """
    return np.logical_and(np.greater(replicas, 1), np.logical_not(single_stage)).astype(int)


def vertical_versions(delay: Any, first_replicas: Any, replicas: Any) -> Any:
    """Versions of the weights that a stage keeps under vertical sync: 1 + ceil((delay · r_1 - gcd(r_1, r)) / r).

    `delay` is depth plus lag of the input stage, r_1 its replicas. The version of a minibatch is as old as the input
    stage's; this stage has made one update more for every r minibatches since. Counted in replays: docs/cost-model.md.
    """
    return 1 + -((np.gcd(first_replicas, replicas) - delay * first_replicas) // replicas)


def buffered_synchronisation(allreduce_s: Any, accumulate: int) -> Any:
    """Gradient synchronisation per minibatch under 2BW: one all-reduce for every `accumulate` minibatches."""
    return allreduce_s / accumulate


def buffered_wait(allreduce_s: Any, pace_s: float, copies: int = 1) -> Any:
    """Minibatches (of one copy) that an update of 2BW comes after the last backward of its group.

    The pipeline waits for none of them where depth · replicas + wait ≤ minibatches per update, in each copy: then the
    update is there before the first forward that needs it.
    """
    return np.maximum(0.0, allreduce_s / pace_s - 1.0 / copies)


def buffered_pace(depth: int, replicas: int, allreduce_s: float, minibatches: int, copies: int = 1) -> float:
    """The pace at which two versions suffice: depth · replicas + `buffered_wait` ≤ minibatches, solved for the pace.

    `minibatches` are those of one update in one copy, accumulate // copies. Infinite where more are in flight.
    """
    spare = minibatches - depth * replicas
    return float("inf") if spare < 0 else allreduce_s / (spare + 1.0 / copies)


def rounds(minibatches: Any, servers: Any) -> Any:
    """How many of so many minibatches the busiest of `servers` takes, which take them in turn: ceil(M / servers)."""
    return -(-minibatches // servers)


def flush_steady(pass_s: Any, minibatches: Any, servers: Any) -> Any:
    """What the minibatches after the first add to a batch where this resource is the slowest: (ceil(M / r) - 1) · pass.

    `servers` are the replicas of a stage or the links of a boundary, `pass_s` the time of one minibatch on one of them.
    """
    return (rounds(minibatches, servers) - 1) * pass_s


def flush_exposed(allreduce_s: Any, before_s: Any) -> Any:
    """What of a stage's all-reduce a flush waits for: max(0, allreduce - work of all layers before the stage).

    While it runs, the stages before drain, and then fill the pipeline again.
    """
    return np.maximum(0.0, allreduce_s - before_s)


def flush_batch(work_s: Any, transfers_s: Any, steady_s: Any, exposed_s: Any, copies_s: Any = 0.0) -> Any:
    """Seconds from one update to the next of a synchronous pipeline.

    The first minibatch passes all stages, forward and backward (`work_s`, recomputation included), and all boundaries
    both ways (`transfers_s`); the others follow at the pace of the slowest (`flush_steady`); then the largest
    `flush_exposed`, and the all-reduce among copies of the pipeline.
    """
    return work_s + transfers_s + steady_s + exposed_s + copies_s


def flush_pace(steady_s: Any, minibatches: int) -> float:
    """The pace within a batch, for `in_flight_depth`: the other minibatches follow the first in `steady_s`."""
    return float(steady_s) / (minibatches - 1) if minibatches > 1 else float("inf")


def fixed_memory(parameters: Any, buffers: Any, boundary: Any, optimizer_ratio: float, training: bool) -> Any:
    """Bytes of one worker that do not grow with the depth.

    Training: one gradient and the optimiser's state per parameter, module buffers, and a minibatch of communication
    buffers each way at both boundaries (`boundary` bytes). Inference: the weights instead of gradient and state.
    """
    per_parameter = 1.0 + optimizer_ratio if training else 1.0
    return parameters * per_parameter + buffers + boundary


def replica_memory(parameters: Any, replicas: Any, lag: Any = 0) -> Any:
    """Bytes that replication adds in training: flat buckets for the all-reduce, and a version for a late update."""
    return parameters * (np.greater(replicas, 1) + lag)


def version_memory(parameters: Any, versions: Any) -> Any:
    """Bytes of versions of the weights, where their number does not follow from the depth of the stage itself."""
    return parameters * versions


def recompute_memory(saved: Any, sent: Any, recompute: Any) -> Any:
    """Bytes that a stage which recomputes holds once, whatever its depth: of one minibatch, what backward needs."""
    return np.where(recompute, saved + sent, 0)


def memory_per_depth(
    parameters: Any, saved: Any, received: Any, sent: Any, *, stashes: bool = True, recompute: Any = False
) -> Any:
    """Bytes in training for every minibatch in flight: what backward needs, input and output, and a version of the
    weights where the schedule `stashes` one for each. Of a stage that recomputes, only the input (and the version).

    What crosses a boundary is held on both sides until the backward pass. A profile counts it once, with the layer
    that keeps it first, whichever side that is on: here it is charged to both, which may count it twice on one side.
    """
    return parameters * stashes + received + np.where(recompute, 0, saved + sent)
