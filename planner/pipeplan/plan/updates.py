"""The updates of a plan: the age of the weights behind each gradient, and the samples that an update averages over.

The executor derives the same figures from stage files (`pipeplan_launch.plan.run_options`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING

MOST_LISTED = 8
"""Largest number of stages for which every stage is listed."""


def minibatches_of_update(plan: Plan, index: int) -> int:
    """Number of minibatches that an update of a stage averages over."""
    return plan.accumulate or 1 if plan.schedule in ACCUMULATING else plan.stages[index].replicas


@dataclass(frozen=True)
class Updates:
    """The updates of the stages of a plan for training."""

    schedule: str
    stale_by: tuple[int, ...]
    """For each stage, most updates between a forward pass and the update with its gradient (τ in docs/learning.md)."""
    samples: tuple[int, ...]
    """For each stage, the number of samples that an update averages over."""

    @staticmethod
    def of(plan: Plan, minibatch: int) -> Updates:
        """The updates of a training plan with `minibatch` samples in a minibatch."""
        stages = range(len(plan.stages))
        groups = [
            plan.accumulate if plan.schedule in ACCUMULATING and plan.accumulate else plan.stages[index].replicas
            for index in stages
        ]
        # A stage keeps one version of its weights for each possible age of its gradients.
        stale_by = tuple(plan.versions(index) - 1 for index in stages)
        return Updates(plan.schedule, stale_by, tuple(group * minibatch for group in groups))

    @property
    def synchronous(self) -> bool:
        """Whether every gradient is computed with the weights that it updates."""
        return not any(self.stale_by)

    @property
    def text(self) -> str:
        """One sentence on staleness and samples."""
        average = f"an update averages over {_by_stage(self.samples, 'samples')}"
        if self.synchronous:
            return f"Synchronous ({self.schedule}): no gradient is stale; {average}."
        word = "update old" if set(self.stale_by) == {1} else "updates old"
        ages = _by_stage(self.stale_by, word)
        return f"Asynchronous ({self.schedule}): gradients are up to {ages}; {average}."

    def to_json(self) -> dict[str, object]:
        """The fields that plan.json holds under `updates`."""
        return {"synchronous": self.synchronous, "stale_by": list(self.stale_by), "samples": list(self.samples)}


def _by_stage(values: Sequence[int], unit: str) -> str:
    """The common value of all stages, or the values by stage.

    If there are many stages, only the first few values and the last value are shown.
    """
    if len(set(values)) == 1:
        return f"{values[0]} {unit}"
    listed = [str(value) for value in values]
    return f"{', '.join(listed if len(listed) <= MOST_LISTED else [*listed[:3], '…', listed[-1]])} {unit} by stage"
