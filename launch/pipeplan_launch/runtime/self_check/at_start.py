"""The self-check of a run, at its first worker: the whole model against the plan's own stages."""

from __future__ import annotations

from pipeplan_launch.job.job import Job
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.runtime.self_check.differences import OPTION
from pipeplan_launch.runtime.self_check.self_check import self_check
from pipeplan_launch.telemetry.free_memory import free_bytes
from pipeplan_launch.telemetry.progress import print_status
from pipeplan_launch.tracing.trace import TracedModel

LARGE_BYTES = 100 << 20
"""Weights from which on the check takes seconds, so that a line says what the workers wait for."""


def check_at_start(plan: LaunchPlan, job: Job, traced: TracedModel, seed: int) -> None:
    """Compare training in the plan's stages with plain training. Raises `LaunchError` for a difference."""
    if sum(parameter.nbytes for parameter in traced.model.parameters()) >= LARGE_BYTES:
        print_status("self-check: two training steps of the model alone and in stages")
    trains = plan.mode == "training"
    found = self_check(job, traced, seed=seed, free=free_bytes(), layers=plan.layers, trains=trains)
    for line in (*([_unchecked(found.skipped)] if found.skipped else []), *found.remarks):
        print_status(f"note: {line}")


def say_unchecked(plan: LaunchPlan, job: Job, traced: TracedModel, seed: int) -> None:
    """Say that nothing is compared, because the user wants it so."""
    print_status(f"note: {_unchecked(OPTION)}")


def _unchecked(why: str) -> str:
    return f"not self-checked, whether the plan's stages train as the model alone does ({why})"
