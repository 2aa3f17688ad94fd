"""Trace a model without its data: built on the meta device where it can be, else on the CPU."""

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
class Built:
    """A traced model, and its job with the inputs and data as its author made them."""

    job: Job
    traced: TracedModel
    note: str
    """What a reader should know of how it was built; may be empty."""


def build(ref: str, seed: int, minibatch: int | None, granularity: str) -> Built:
    """The model that `ref` names, traced. Raises `LaunchError` where it can be built in neither way."""
    try:
        job = load_job(ref, seed, device=META)
        _move(job.model)
        return Built(job, trace_job(without_data(job), minibatch or job.minibatch, granularity), "")
    except LaunchError as error:
        why = str(error)
    # It may insist on real tensors. Where it does not work with them either, what that says is what is wrong.
    job = load_job(ref, seed)
    traced = trace_job(job, minibatch or job.minibatch, granularity)
    return Built(job, traced, f"built on the CPU with all its data, as it could not be on the meta device: {why}")


def _move(model: nn.Module) -> None:
    """What came from elsewhere (a NumPy array, a file) has its data still.

    Raises `LaunchError` where that would untie parameters.
    """
    before = len(list(model.parameters()))
    model.to(META)
    if len(list(model.parameters())) != before:
        raise LaunchError("tied parameters were given their data while it was built")


def without_data(job: Job) -> Job:
    """The same job, whose example inputs have no data."""
    given: Callable[[int], Any] = _from_data(job) if job.inputs is None else job.inputs
    return replace(job, inputs=lambda n: tree_map_only(Tensor, lambda one: one.to(META), given(n)))


def _from_data(job: Job) -> Callable[[int], Any]:
    def inputs(minibatch: int) -> Any:
        batch = job.example_batch(minibatch)
        names = getattr(batch, "names", ())
        return dict(zip(names, batch.inputs, strict=True)) if names else batch.inputs

    return inputs
