"""The formulas of docs/cost-model.md, implemented independently of `pipeplan.cost.formulas`.

All functions accept scalars or NumPy arrays. Times are seconds, sizes bytes, bandwidths bytes/s.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDING = 1e-9
"""A quotient that exceeds an integer by less than this counts as that integer, as in the planner."""


def ring_allreduce_s(members: Any, size: Any, bandwidth: Any, latency_s: Any) -> Any:
    """Time of one ring all-reduce: 2 (m-1)/m · size / B + 2 (m-1) α."""
    steps = 2.0 * (members - 1)
    return steps * (size / (members * bandwidth) + latency_s)


def overlapped_s(compute_s: Any, synchronisation_s: Any, overlap: float) -> Any:
    """Time of compute c and synchronisation g with overlap ω: max(c, g) + (1-ω) min(c, g)."""
    longer, shorter = np.maximum(compute_s, synchronisation_s), np.minimum(compute_s, synchronisation_s)
    return longer + (1.0 - overlap) * shorter


def group_wait(allreduce_s: Any, pace_s: float, replicas: Any, copies: int) -> Any:
    """Minibatches that pass while replicas wait for an all-reduce: max(0, G/T - 1), or r - 1/m with m copies."""
    if copies > 1:
        return replicas - 1.0 / copies
    return np.maximum(0.0, allreduce_s / pace_s - 1.0)


def in_flight_depth(demand: Any, waiting: Any, transfer_s: Any, pace_s: float, replicas: Any) -> Any:
    """In-flight depth: 1 + ⌈(demand + wait + 2 x / T) / r⌉, with demand = d′ r′ + wait′ of the next stage."""
    return 1.0 + np.ceil((demand + waiting + 2.0 * transfer_s / pace_s) / replicas - ROUNDING)
