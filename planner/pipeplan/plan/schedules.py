"""The schedules of training, by the executor's names for them, and their weight versions.

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
    """Number of phases of a batch, each with its own slowest resource: 1 if forward and backward passes alternate, as
    in 1F1B; 2 if all forward passes come before all backward passes, as in GPipe; 0 without a flush."""
    common_update: bool = False
    """Whether all stages update together, after `accumulate` minibatches."""
    versions: int = 0
    """Smallest number of weight versions that a stage keeps; 0 if each minibatch in flight has its own version."""
    splits: bool = False
    """Whether gradients of the weights have a separate pass."""
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
"""Schedules in which gradients of the weights have a separate pass."""
FLUSHING = tuple(name for name, traits in TRAITS.items() if traits.phases)
"""Synchronous schedules: the pipeline drains before every update."""
ACCUMULATING = tuple(name for name, traits in TRAITS.items() if traits.common_update)
"""Schedules in which all stages update together, after `accumulate` minibatches."""
CORRECTIONS = ("none", "ef")
"""Remedies for old gradients: nothing, or error feedback on updates (docs/schedules.md, "Old gradients")."""
CORRECTED = tuple(name for name, traits in TRAITS.items() if traits.corrected)
"""The schedules that a plan may correct."""
INFERENCE = "forward-only"
"""The schedule of inference."""


def update_share(accumulate: int | None) -> float:
    """Share of an optimiser step that is charged to each minibatch of a worker, as part of its backward pass.

    Without `accumulate` the share is 1: each replica makes one step for each minibatch that it computes. Otherwise one
    step serves `accumulate` minibatches of the stage. The share is then 1 / accumulate, which is exact for a stage
    without replicas (docs/cost-model.md, "The optimiser's step").
    """
    return 1.0 if accumulate is None else 1.0 / accumulate


def copied_share(schedule: str, accumulate: int | None) -> float:
    """Number of copies of its weights that a stage before the last makes for each minibatch.

    A stage copies its weights while older versions are in use. A schedule with one version makes no copies. Other
    schedules copy the weights once for every update, at the rate of `update_share`.
    """
    if schedule in FLUSHING:
        return 0.0
    return update_share(accumulate if schedule in ACCUMULATING else None)


def update_lag(replicas: Any, single_stage: Any) -> Any:
    """Update lag of a stage, 0 or 1: the number of updates that its weights lack while their all-reduce runs.

    The lag is 1 for a replicated stage of a pipeline. The lag is 0 for a stage without replicas, which has no
    all-reduce, and for plain data parallelism (`single_stage`), which stays synchronous.
    """
    return np.logical_and(np.greater(replicas, 1), np.logical_not(single_stage)).astype(int)


def vertical_versions(delay: Any, first_replicas: Any, replicas: Any) -> Any:
    """Number of weight versions that a stage keeps under vertical sync: 1 + ceil((delay · r_1 - gcd(r_1, r)) / r).

    `delay` is the depth plus the update lag of the input stage, r_1 (`first_replicas`) the replicas of the input stage,
    and r the replicas of this stage. A minibatch uses the version that was current at the input stage `delay` · r_1
    minibatches ago. Since then this stage has made one update for every r minibatches. The gcd was found by counting
    versions in replays of the schedule (docs/cost-model.md).
    """
    return 1 + -((np.gcd(first_replicas, replicas) - delay * first_replicas) // replicas)
