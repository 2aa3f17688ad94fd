"""The formulas of docs/cost-model.md, written out again. Scalars or arrays; seconds per minibatch, bytes, bytes/s."""

from __future__ import annotations

from typing import Any

import numpy as np

WHOLE = 1e-9
"""What a quotient may exceed an integer by and still count as that integer, as in the planner."""


def ring(members: Any, size: Any, bandwidth: Any, latency_s: Any) -> Any:
    """One ring all-reduce: 2 (m-1)/m · size / B + 2 (m-1) α."""
    steps = 2.0 * (members - 1)
    return steps * (size / (members * bandwidth) + latency_s)


def together(compute_s: Any, synchronisation_s: Any, overlap: float) -> Any:
    """max + (1-ω) min: what does not hide behind the longer of the two comes on top."""
    longer, shorter = np.maximum(compute_s, synchronisation_s), np.minimum(compute_s, synchronisation_s)
    return longer + (1.0 - overlap) * shorter


def wait(allreduce_s: Any, pace_s: float, replicas: Any, copies: int) -> Any:
    """max(0, G/T - 1) minibatches; in copies of a pipeline, the bound r - 1/m."""
    if copies > 1:
        return replicas - 1.0 / copies
    return np.maximum(0.0, allreduce_s / pace_s - 1.0)


def depth(demand: Any, waiting: Any, transfer_s: Any, pace_s: float, replicas: Any) -> Any:
    """1 + ⌈(demand + wait + 2 x / T) / r⌉, with demand = d′ r′ + wait′ of the next stage."""
    return 1.0 + np.ceil((demand + waiting + 2.0 * transfer_s / pace_s) / replicas - WHOLE)
