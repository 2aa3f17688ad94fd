"""How old the weights are that gradients are computed with, and what an update averages over, in one sentence.

The planner says the same of the plan (`pipeplan.plan.updates`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.staleness import delays

MOST_LISTED = 8
"""Stages up to which every stage is listed."""


def updates_sentence(plan: LaunchPlan) -> str:
    """The sentence on a plan for training."""
    ages = delays(plan)
    groups = [plan.accumulate or len(stage.workers) for stage in plan.pipeline]
    average = f"an update averages over {_by_stage([group * plan.minibatch for group in groups], 'samples')}"
    if not any(ages):
        return f"Synchronous ({plan.schedule.name}): no gradient is stale; {average}."
    old = _by_stage(ages, "update old" if set(ages) == {1} else "updates old")
    return f"Asynchronous ({plan.schedule.name}): gradients are up to {old}; {average}."


def _by_stage(values: Sequence[int], unit: str) -> str:
    """The value that all stages have, or the values stage by stage; of many stages the first and the last."""
    if len(set(values)) == 1:
        return f"{values[0]} {unit}"
    listed = [str(value) for value in values]
    return f"{', '.join(listed if len(listed) <= MOST_LISTED else [*listed[:3], '…', listed[-1]])} {unit} by stage"
