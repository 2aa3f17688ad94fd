"""Trace a model, and see that its stages train as the model alone does (`pipeplan_launch.runtime.self_check`).

Where they do not because a module writes a buffer in a way that tracing loses, that module is taken whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pipeplan.profile_data.training_needs import LEFT_OUT, unchecked_text
from pipeplan.profiler.options import ProfilerOptions, Progress
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.runtime.self_check.check import DifferenceFound
from pipeplan_launch.runtime.self_check.self_check import SelfCheck, self_check
from pipeplan_launch.tracing.export_fallback import enclosing_module, is_same_or_inside
from pipeplan_launch.tracing.trace import TracedModel, trace_job


@dataclass(frozen=True)
class CheckedTraining:
    """A traced model, and the outcome of its self-check."""

    traced: TracedModel
    outcome: SelfCheck
    taken_whole: tuple[str, ...] = ()
    """Submodules that are not traced inside, because their stages would train otherwise."""

    @property
    def unchecked(self) -> str:
        """Why the self-check was not made; empty if it was."""
        return self.outcome.skipped

    @property
    def remarks(self) -> list[str]:
        """The remarks of the self-check, or that it was not made."""
        remarks = [unchecked_text(self.unchecked)] if self.unchecked else []
        if self.taken_whole:
            names = ", ".join(map(repr, self.taken_whole))
            remarks.append(f"taken whole, as their stages would not train as the model alone does: the modules {names}")
        return [*remarks, *self.outcome.remarks]


def check_training(
    job: Job,
    minibatch: int,
    options: ProfilerOptions,
    free: int | None,
    progress: Progress,
    check_data: Callable[[TracedModel], None] = lambda _: None,
) -> CheckedTraining:
    """Trace the job's model for minibatches of this size, and compare its stages with the model alone.

    `free`: free memory in bytes, None if unknown. `check_data` raises for data that would spoil the comparison. Raises
    `LaunchError` for a difference that taking modules whole does not cure.
    """
    progress(0, 0, "tracing")
    traced = trace_job(job, minibatch, options.granularity)
    check_data(traced)
    if not options.self_check:
        return CheckedTraining(traced, SelfCheck(LEFT_OUT))
    progress(0, 0, "self-check")
    try:
        return CheckedTraining(traced, self_check(job, traced, seed=options.seed, free=free))
    except DifferenceFound as error:
        first = error
    whole: tuple[str, ...] = ()
    path = first.difference.path
    with suppress(LaunchError):  # the first difference says more than why a module cannot be taken whole
        while path is not None:
            whole = (*(other for other in whole if not is_same_or_inside(other, path)), path)
            traced = trace_job(job, minibatch, options.granularity, whole)
            try:
                return CheckedTraining(traced, self_check(job, traced, seed=options.seed, free=free), whole)
            except DifferenceFound as error:
                path = _next_path(job, error.difference.path, whole)
    raise first


def _next_path(job: Job, path: str | None, whole: tuple[str, ...]) -> str | None:
    """The module to take whole for a further difference in module `path`: a module around it if it is taken already."""
    while path is not None and any(is_same_or_inside(path, other) for other in whole):
        path = enclosing_module(job.model, path)
    return path
