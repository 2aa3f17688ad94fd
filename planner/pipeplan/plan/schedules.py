"""The schedules of training, by the names that the executor knows them by, and the weight versions that they keep.

docs/concepts.md describes the schedules, docs/cost-model.md has the table of their weight versions. The functions
accept scalars or NumPy arrays that broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

STASHING, VERTICAL, DOUBLE_BUFFERED, GPIPE, FLUSH = "1f1b-stashing", "vertical-sync", "2bw", "gpipe", "1f1b-flush"
ZERO_BUBBLE = "zb-h1"
INTERLEAVED, ZERO_BUBBLE_V = "interleaved-1f1b", "zb-v"


@dataclass(frozen=True)
class ScheduleTraits:
    """The properties of a schedule that formulas, searches and the simulation depend on."""

    phases: int = 0
    """With a flush, the phases of a batch that each have a slowest resource: forward and backward passes in turn are
    one, as in 1F1B, all forward passes before all backward passes are two. 0 without a flush."""
    common_update: bool = False
    """Whether all stages make one update for a common number of minibatches, `accumulate`."""
    versions: int = 0
    """Weight versions that a stage keeps in any case; 0 where each minibatch in flight has its own."""
    splits: bool = False
    """Whether gradients of the weights have a pass of their own."""
    virtual: bool = False
    """Whether workers run several stages each (docs/schedules.md)."""
    corrected: bool = False
    """Whether a plan may correct updates from old gradients."""


TRAITS = {
    STASHING: ScheduleTraits(corrected=True),
    VERTICAL: ScheduleTraits(versions=1),
    DOUBLE_BUFFERED: ScheduleTraits(common_update=True, versions=2, corrected=True),
    GPIPE: ScheduleTraits(phases=2, common_update=True, versions=1),
    FLUSH: ScheduleTraits(phases=1, common_update=True, versions=1),
    ZERO_BUBBLE: ScheduleTraits(phases=1, common_update=True, versions=1, splits=True),
    INTERLEAVED: ScheduleTraits(phases=1, common_update=True, versions=1, virtual=True),
    ZERO_BUBBLE_V: ScheduleTraits(phases=1, common_update=True, versions=1, splits=True, virtual=True),
}
"""The table of all schedules of training. Under vertical sync, versions beyond the first follow from the input stage
(`vertical_versions`)."""
SCHEDULES = tuple(TRAITS)
"""All schedules of training."""
VIRTUAL = tuple(name for name, traits in TRAITS.items() if traits.virtual)
"""Schedules whose workers run several stages each."""
SPLITTING = tuple(name for name, traits in TRAITS.items() if traits.splits)
"""Schedules in which gradients of the weights have a pass of their own."""
FLUSHING = tuple(name for name, traits in TRAITS.items() if traits.phases)
"""Synchronous schedules: the pipeline drains before every update."""
ACCUMULATING = tuple(name for name, traits in TRAITS.items() if traits.common_update)
"""Schedules in which all stages make one update for a common number of minibatches, `accumulate`."""
CORRECTIONS = ("none", "ef")
"""Remedies for old gradients: nothing, or error feedback on updates (docs/schedules.md, "Old gradients")."""
CORRECTED = tuple(name for name, traits in TRAITS.items() if traits.corrected)
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
