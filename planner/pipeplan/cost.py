"""Every formula of the cost model, once. All accept scalars or NumPy arrays that broadcast.

Times are seconds per minibatch in the steady state of asynchronous one-forward-one-backward (1F1B), sizes bytes,
bandwidths bytes/s. Source: Narayanan et al., PipeDream, SOSP 2019, §3.1; docs/cost-model.md tells what differs.
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


def compute_time(work_s: Any, replicas: Any, speed: float) -> Any:
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


def boundary_time(size: Any, bandwidth: Any) -> Any:
    """How long a minibatch keeps the link between two stages busy in one direction: size / bandwidth."""
    return size / bandwidth


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


def fixed_memory(parameters: Any, buffers: Any, boundary: Any, optimizer_ratio: float, training: bool) -> Any:
    """Bytes of one worker that do not grow with the depth.

    Training: one gradient and the optimiser's state per parameter, module buffers, and a minibatch of communication
    buffers each way at both boundaries (`boundary` bytes). Inference: the weights instead of gradient and state.
    """
    per_parameter = 1.0 + optimizer_ratio if training else 1.0
    return parameters * per_parameter + buffers + boundary


def replica_memory(parameters: Any, replicas: Any, lag: Any) -> Any:
    """Bytes that replication adds in training: flat buckets for the all-reduce, and a version for a late update."""
    return parameters * (np.greater(replicas, 1) + lag)


def memory_per_depth(parameters: Any, saved: Any, received: Any, sent: Any) -> Any:
    """Bytes in training for every minibatch in flight: a version of the weights, what backward needs, input and output.

    What crosses a boundary is held on both sides until the backward pass. A profile counts it once, with the layer
    that keeps it first, whichever side that is on: here it is charged to both, which may count it twice on one side.
    """
    return parameters + saved + received + sent
