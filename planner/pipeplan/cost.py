"""Every formula of the cost model, once. All accept scalars or NumPy arrays that broadcast.

Times are seconds per minibatch in the steady state of asynchronous one-forward-one-backward (1F1B), sizes bytes,
bandwidths bytes/s. Source: Narayanan et al., PipeDream, SOSP 2019, §3.1; docs/cost-model.md tells what differs.
"""

from __future__ import annotations

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


def in_flight_depth(downstream: Any, transfer_s: Any, pace_s: float, replicas: Any) -> Any:
    """Minibatches that each replica of a stage holds in flight so that the pipeline keeps `pace_s`.

    1 + ceil((downstream + 2 · transfer / pace) / replicas), with `downstream` the minibatches in flight at the next
    stage (its depth times its replicas). The last stage needs 1. PipeDream's own warm-up count, the ratio of the
    workers from here on to the replicas here, is a lower bound that loses pace where replicas are unequal or
    transfers take long.
    """
    return 1 + np.ceil((downstream + 2 * transfer_s / pace_s) / replicas - ROUNDING)


def depth_limited_pace(depth: int, replicas: int, downstream: int, transfer_s: float) -> float:
    """The pace that a depth sustains: `in_flight_depth` solved for the pace (infinite where the depth is too small)."""
    slack = (depth - 1 + ROUNDING) * replicas - downstream
    return 2 * transfer_s / slack if slack > 0 else float("inf")


def fixed_memory(parameters: Any, buffers: Any, boundary: Any, optimizer_ratio: float, training: bool) -> Any:
    """Bytes of one worker that do not grow with the depth.

    Training: one gradient and the optimiser's state per parameter, module buffers, and a minibatch of communication
    buffers each way at both boundaries (`boundary` bytes). Inference: no gradient and no state.
    """
    per_parameter = 1.0 + optimizer_ratio if training else 0.0
    return parameters * per_parameter + buffers + boundary


def memory_per_depth(parameters: Any, saved: Any) -> Any:
    """Bytes of one worker for every minibatch in flight: a version of the weights and what backward needs."""
    return parameters + saved
