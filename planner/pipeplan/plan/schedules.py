"""The schedules of training, by the names that the executor knows them by, and the weight versions that they keep.

docs/concepts.md describes the schedules, docs/cost-model.md has the table of their weight versions. The functions
accept scalars or NumPy arrays that broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np

STASHING, VERTICAL, DOUBLE_BUFFERED, GPIPE, FLUSH = "1f1b-stashing", "vertical-sync", "2bw", "gpipe", "1f1b-flush"
ZERO_BUBBLE = "zb-h1"
INTERLEAVED, ZERO_BUBBLE_V = "interleaved-1f1b", "zb-v"
SCHEDULES = (STASHING, VERTICAL, DOUBLE_BUFFERED, GPIPE, FLUSH, ZERO_BUBBLE, INTERLEAVED, ZERO_BUBBLE_V)
"""All schedules of training."""
VIRTUAL = (INTERLEAVED, ZERO_BUBBLE_V)
"""Schedules whose workers run several stages each (docs/virtual-stages.md)."""
SPLITTING = (ZERO_BUBBLE, ZERO_BUBBLE_V)
"""Schedules in which gradients of the weights have a pass of their own."""
FLUSHING = (GPIPE, FLUSH, ZERO_BUBBLE, *VIRTUAL)
"""Synchronous schedules: the pipeline drains before every update."""
ACCUMULATING = (DOUBLE_BUFFERED, *FLUSHING)
"""Schedules in which all stages make one update for a common number of minibatches, `accumulate`."""
CORRECTIONS = ("none", "ef")
"""What is done about old gradients: nothing, or error feedback on updates (docs/executor.md, "Old gradients")."""
CORRECTED = (STASHING, DOUBLE_BUFFERED)
"""The schedules that a plan may correct."""
INFERENCE = "forward-only"
"""The schedule of inference."""


def update_share(accumulate: int | None) -> float:
    """Share of an optimiser step that is charged to each minibatch of a worker, as part of its backward pass.

    Without `accumulate` the share is 1: each replica makes one step for each minibatch that it computes. With it, one
    step serves `accumulate` minibatches of the stage, so the share is 1 / accumulate, which is exact for a stage
    without replicas (docs/cost-model.md, "The optimiser's step").
    """
    return 1.0 if accumulate is None else 1.0 / accumulate


def copied_share(schedule: str, accumulate: int | None) -> float:
    """Copies of its weights that a stage before the last makes for each minibatch, because versions are still in use.

    A schedule with one version makes none. The others copy once for every update, as often as `update_share` says.
    """
    if schedule in FLUSHING:
        return 0.0
    return update_share(accumulate if schedule in ACCUMULATING else None)


def update_lag(replicas: Any, single_stage: Any) -> Any:
    """Number of updates by which a stage uses older weights because its all-reduce is awaited one update later: 0 or 1.

    It is 1 for a replicated stage of a pipeline. A stage without replicas has no all-reduce to await, and plain data
    parallelism (`single_stage`) stays synchronous: both have 0.
    """
    return np.logical_and(np.greater(replicas, 1), np.logical_not(single_stage)).astype(int)


def vertical_versions(delay: Any, first_replicas: Any, replicas: Any) -> Any:
    """Number of weight versions that a stage keeps under vertical sync: 1 + ceil((delay · r_1 - gcd(r_1, r)) / r).

    `delay` is the depth plus the update lag of the input stage, r_1 (`first_replicas`) its replicas, r those of this
    stage. A minibatch uses the version that was current at the input stage, `delay` · r_1 minibatches ago; this stage
    has made one update for every r minibatches since. The gcd was found by counting versions in replays of the
    schedule (docs/cost-model.md).
    """
    return 1 + -((np.gcd(first_replicas, replicas) - delay * first_replicas) // replicas)
