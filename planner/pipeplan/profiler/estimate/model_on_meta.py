"""Trace a model without computing: on the meta device if the model can be built there, else on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.tracing.trace import TracedModel, trace_job

META = "meta"


@dataclass(frozen=True)
class TracedJob:
    """A traced model, and its job with the author's own inputs and data."""

    job: Job
    traced: TracedModel
    note: str
    """A remark on how the model was built; may be empty."""


def trace_for_estimate(ref: str, seed: int, minibatch: int | None, granularity: str) -> TracedJob:
    """Trace the model that `ref` names. Raises `LaunchError` if it can be built neither on meta nor on the CPU."""
    try:
        job = load_job(ref, seed, device=META)
        _move_to_meta(job.model)
        return TracedJob(job, trace_job(without_data(job), minibatch or job.minibatch, granularity), "")
    except LaunchError as error:
        reason = str(error)
    # The model may need real tensors. If it does not work with them either, that error is the one to report.
    job = load_job(ref, seed)
    traced = trace_job(job, minibatch or job.minibatch, granularity)
    return TracedJob(
        job, traced, f"built on the CPU with all its data, because it cannot be built on the meta device: {reason}"
    )


def _move_to_meta(model: nn.Module) -> None:
    """Move tensors to the meta device that are not there yet because they come from a NumPy array or a file.

    Raises `LaunchError` if that unties parameters.
    """
    before = len(list(model.parameters()))
    model.to(META)
    if len(list(model.parameters())) != before:
        raise LaunchError("the model gives tied parameters their data while it is built")


def without_data(job: Job) -> Job:
    """A copy of the job whose example inputs are on the meta device."""
    inputs: Callable[[int], Any] = _inputs_from_data(job) if job.inputs is None else job.inputs
    return replace(job, inputs=lambda n: tree_map_only(Tensor, lambda tensor: tensor.to(META), inputs(n)))


def _inputs_from_data(job: Job) -> Callable[[int], Any]:
    def inputs(minibatch: int) -> Any:
        batch = job.example_batch(minibatch)
        names = getattr(batch, "names", ())
        return dict(zip(names, batch.inputs, strict=True)) if names else batch.inputs

    return inputs
