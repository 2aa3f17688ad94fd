"""Estimate a profile for a device that this machine does not have.

The model is traced without computing: on the meta device if it can be built there, else on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from pipeplan.cluster_data import devices
from pipeplan.cluster_data.devices import DeviceFile
from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.estimate.flops import OPAQUE, WorkCounts, count_work, sample_work
from pipeplan.profiler.estimate.work import Work, total_seconds
from pipeplan.profiler.optimizer_step import optimizer_state
from pipeplan.profiler.options import ProfilerOptions, Progress, smaller_sizes
from pipeplan.profiler.outcome import boundary_tensors, layer_fields, profile_from
from pipeplan.profiler.passes import training_loss
from pipeplan.profiler.remarks import lacking_remarks, tie_remarks
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.tracing.export import quiet
from pipeplan_launch.tracing.trace import TracedModel, trace_job

META = "meta"
ESTIMATE_METHOD = (
    "estimated, not measured: for every operator the larger of FLOPs and bytes, each over the rate that this kind of "
    "operator reaches on the device, by its device file"
)
UPDATE_PASSES = 3
"""A step reads each parameter, writes it, and reads its gradient: three tensors of its size, plus the state."""


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
    # The model may need real tensors. If it fails with real tensors too, that second error is reported.
    job = load_job(ref, seed)
    traced = trace_job(job, minibatch or job.minibatch, granularity)
    return TracedJob(
        job, traced, f"built on the CPU with all its data, because it cannot be built on the meta device: {reason}"
    )


def _move_to_meta(model: nn.Module) -> None:
    """Move the remaining tensors, which come from NumPy arrays or files, to the meta device.

    Raises `LaunchError` if that unties parameters.
    """
    before = len(list(model.parameters()))
    model.to(META)
    if len(list(model.parameters())) != before:
        raise LaunchError("the model gives tied parameters their data while it is built")


def without_data(job: Job) -> Job:
    """A copy of the job whose example inputs are on the meta device."""

    def inputs(minibatch: int) -> Any:
        if job.inputs is not None:
            made = job.inputs(minibatch)
        else:
            batch = job.example_batch(minibatch)
            names = getattr(batch, "names", ())
            made = dict(zip(names, batch.inputs, strict=True)) if names else batch.inputs
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), made)

    return replace(job, inputs=inputs)


def estimate_model(ref: str, options: ProfilerOptions, progress: Progress = lambda done, total, what: None) -> Profile:
    """Estimate the model that `ref` names, for the bundled device or device file that `options` names.

    Nothing is computed: the model is traced and run on tensors without data. Raises `InputError` if the model cannot be
    traced or run, or if an option or the device is wrong.
    """
    device = devices.load_device(options.device)
    progress(0, 0, "tracing")
    try:
        built = trace_for_estimate(ref, options.seed, options.minibatch, options.granularity)
        sizes = options.batches or (built.job.minibatch,)
        if built.traced.dynamic_batch:
            # An estimate is nearly linear in the samples, so the smallest and the largest size are enough.
            sizes += tuple(smaller_sizes(sizes, options.halvings)[-1:])
        ratio = optimizer_state(built.job).ratio
        all_counts, estimated = [], []
        for done, size in enumerate(sizes):
            progress(done, len(sizes), "counting")
            counts = count_minibatch_work(ref, built, size)
            all_counts.append(counts)
            estimated.append(_size(built.traced, counts, size, device, ratio))
        return profile_from(
            ref,
            built.job,
            built.traced,
            options.granularity,
            estimated,
            _provenance(built, device, all_counts[0]),
            work=sample_work(built.job, all_counts[0], sizes[0]),
        )
    except LaunchError as error:
        raise InputError(str(error)) from error


def _provenance(built: TracedJob, device: DeviceFile, counts: WorkCounts) -> dict[str, Any]:
    notes = dict.fromkeys([*device.checked, *([built.note] if built.note else [])])
    return {
        "kind": "modelled",
        "device": device.kind,
        "device_name": device.name,
        "how": ESTIMATE_METHOD,
        "notes": (*lacking_remarks(built.job), *notes, *tie_remarks(built.traced)),
        "incomplete": _left_out(counts, built.job.model),
    }


def count_minibatch_work(ref: str, built: TracedJob, minibatch: int) -> WorkCounts:
    """Count the work of the layers at one minibatch size. Raises `LaunchError` if the model does not run there."""
    traced = built.traced
    if minibatch != traced.minibatch and not traced.dynamic_batch:
        raise LaunchError(f"{ref!r} was traced at microbatch {traced.minibatch}, and does not run at {minibatch}")
    batch = built.job.example_batch(minibatch)
    try:
        with quiet():
            return count_work(traced, batch, training_loss(built.job, batch))
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            f"{ref!r} cannot be run on tensors without data: {describe_error(error)}; {_remedy(built.job.model)}"
        ) from error


def _left_out(counts: WorkCounts, model: nn.Module) -> str:
    """A sentence on the work that an estimate leaves out, with a remedy; empty if all work is counted."""
    if not counts.uncounted:
        return ""
    first, what = next(iter(counts.uncounted.items()))
    others = len(counts.uncounted) - 1
    more = f" and of {others} more layer{'s' * (others > 1)}" * bool(others)
    why = "opaque" if what == OPAQUE else f"the operator {what}"
    return f"the work of {first!r} ({why}){more} is not counted; {_remedy(model)}"


def _remedy(model: nn.Module) -> str:
    """The remedy for a model whose work cannot be counted. Mixtures of experts may have another implementation."""
    measure = "measure on the device, with --device cuda"
    has_experts = any(hasattr(getattr(one, "config", None), "_experts_implementation") for one in model.modules())
    return f'make the model with experts_implementation="batched_mm", or {measure}' if has_experts else measure


def _size(traced: TracedModel, counts: WorkCounts, minibatch: int, device: DeviceFile, state_ratio: float) -> Size:
    layers = []
    for info, fields in layer_fields(traced, counts.saved_bytes):
        layers.append(
            Layer(
                **fields,
                forward_s=_rounded(total_seconds(counts.forward[info.name], device)),
                backward_s=_rounded(total_seconds(counts.backward[info.name], device)),
                update_s=_rounded(_update_s(fields["parameter_bytes"], state_ratio, device)),
            )
        )
    return Size(minibatch, tuple(layers), boundary_tensors(traced, lambda spec: counts.tensor_bytes[spec.name]))


def _update_s(parameter_bytes: int, state_ratio: float, device: DeviceFile) -> float:
    """Time of an optimiser's step, which reads parameters, gradients and state, and writes parameters and state."""
    if not parameter_bytes:
        return 0.0
    moved = parameter_bytes * (UPDATE_PASSES + 2 * state_ratio)
    return total_seconds([Work("elementwise", "float32", bytes=moved)], device)


def _rounded(time_s: float) -> float:
    """The time with four significant digits. More digits would suggest a precision that an estimate does not have."""
    return float(f"{time_s:.4g}")
