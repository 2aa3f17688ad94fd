"""Measure a model in this process: trace it, run it layer by layer and as a whole, and keep medians of the times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeplan.cluster_data.local import local_processors
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.busy_cores import BusyCores, load_obstacle
from pipeplan.profiler.clock import BRIEF, THOROUGH, Aim, Clock, CPUClock, CUDAClock, sample_notes
from pipeplan.profiler.estimate.flops import counted_work
from pipeplan.profiler.job_checks import CheckedTraining, check_training
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import (
    check_fits_in_memory,
    failed_allocation_bytes,
    limited_memory,
    out_of_memory_message,
    step_memory_text,
)
from pipeplan.profiler.optimizer_step import StepCost
from pipeplan.profiler.options import ProfilerOptions, Progress, smaller_sizes
from pipeplan.profiler.outcome import MeasuredSize, charged_parameters, profile_from
from pipeplan.profiler.overhead import copies_remarks, copies_seconds
from pipeplan.profiler.passes import MeasuringGroup, Passes, training_loss
from pipeplan.profiler.remarks import (
    batch_norm_remarks,
    evaluation_remarks,
    lacking_remarks,
    layer_sum_remarks,
    promise_remarks,
    tie_remarks,
    unread_parameter_remarks,
)
from pipeplan_launch.allocator import keep_freed_memory
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch, Job
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.telemetry.free_memory import free_bytes
from pipeplan_launch.telemetry.memory import resident_bytes
from pipeplan_launch.tracing.trace import TracedModel

LOST = "a process that kept a core busy has ended"


def profile_in_process(ref: str, options: ProfilerOptions, progress: Progress, group: MeasuringGroup) -> Profile:
    """Profile the model in this process, at the same time as the other processes of `group`.

    Raises `InputError`, which says how much memory is needed if the model does not fit.
    """
    traced_models: list[TracedModel] = []
    free = free_bytes() if options.device == "cpu" else None
    free = None if free is None else free // group.processes
    resident = resident_bytes()
    try:
        with limited_memory(free):
            return _trace_and_measure(ref, options, progress, group, free, traced_models)
    except Exception as error:
        traced = traced_models[0] if traced_models else None
        minibatch = options.minibatch or (traced.minibatch if traced else None)
        if isinstance(error, torch.OutOfMemoryError):
            raise InputError(_device_memory_message(ref, options.device, minibatch, error, traced)) from error
        requested = failed_allocation_bytes(error)
        if requested is not None:
            largest = max(options.batches, default=minibatch)
            raise InputError(out_of_memory_message(ref, largest, free, resident, requested, traced)) from error
        if isinstance(error, LaunchError):
            raise InputError(str(error)) from error
        raise


def _device_memory_message(
    ref: str, device: str, minibatch: int | None, error: Exception, traced: TracedModel | None
) -> str:
    at = f" at microbatch {minibatch}" if minibatch else ""
    reason = " ".join(str(error).split())[:200]
    need = f"; {step_memory_text(traced, minibatch)}" if traced is not None and minibatch else ""
    return f"{ref!r}{at} does not fit in the memory of {device}: {reason}{need}; try a smaller --microbatch"


def _trace_and_measure(
    ref: str,
    options: ProfilerOptions,
    progress: Progress,
    group: MeasuringGroup,
    free: int | None,
    traced_models: list[TracedModel],
) -> Profile:
    """Profile the model. The traced model is appended to `traced_models`, for messages if a later step fails."""
    progress(0, 0, "loading the model")
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    job = load_job(ref, options.seed)
    sizes = options.batches or (job.minibatch,)
    checked = check_training(job, sizes[0], options, free, progress)
    traced = checked.traced
    traced_models.append(traced)
    if len(sizes) > 1 and not traced.dynamic_batch:
        raise InputError(
            f"{ref!r} can only be traced for one microbatch size at a time: give --microbatch one number, and measure "
            "the others in runs of their own"
        )
    check_fits_in_memory(ref, traced, max(sizes), free)
    busy = load_processes(options)
    measured: list[MeasuredSize] = []

    def measure_size(size: int, aim: Aim) -> Passes:
        passes = _passes(job, traced, size, options, progress, group)
        saved = passes.inspect(ref, measure_all=options.measure_all)
        if not measured:
            remarks.extend(promise_remarks(job, traced, passes.run.batch))
        measured.append(_measure(passes, saved, options, aim, busy))
        return passes

    remarks = _remarks_before(job, checked)
    first = measure_size(sizes[0], THOROUGH)
    for size in sizes[1:]:
        measure_size(size, THOROUGH)
    for size in smaller_sizes(sizes, options.halvings) if traced.dynamic_batch else []:
        try:
            measure_size(size, BRIEF)
        except Exception as error:  # the model works at its own size, so that a smaller one is not needed
            remarks.append(f"microbatch {size}, and anything smaller, was not measured: {_reason(error)}")
            break
    remarks += batch_norm_remarks(traced, len(measured))
    remarks += copies_remarks(copies_seconds(first.run, first.clock), measured[0].forward_s)
    read_s = _reading_s(first, remarks)
    with _load(first, busy) as load:
        steps = first.steps(charged_parameters(traced), load)
    if busy and any(size.loaded is None for size in measured):
        remarks.append(f"times with all cores busy were not measured: {load_obstacle(busy) or LOST}")
        measured = [replace(size, loaded=None) for size in measured]
    return _profile(ref, job, checked, measured, steps, options, remarks, read_s)


def _remarks_before(job: Job, checked: CheckedTraining) -> list[str]:
    """The remarks that need no measurement."""
    traced = checked.traced
    return [
        *lacking_remarks(job),
        *checked.remarks,
        *unread_parameter_remarks(traced),
        *tie_remarks(traced),
        *evaluation_remarks(job, traced),
    ]


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, (InputError, LaunchError)) else describe_error(error)


def _reading_s(passes: Passes, remarks: list[str]) -> float:
    """Time of reading a minibatch; 0, and a remark, where the job's data fails on samples that nothing else reads."""
    try:
        return passes.reading()
    except Exception as error:
        remarks.append(f"reading samples was not measured, and would fail in training: {_reason(error)}")
        return 0.0


def load_processes(options: ProfilerOptions) -> int:
    """Busy processes while times under load are measured, one for each core; 0 where no such times are."""
    wanted = options.load and options.device == "cpu" and options.threads == 1 and options.processes == 1
    cores = local_processors().cores if wanted else 0
    return cores if cores > 1 else 0


@contextmanager
def _load(passes: Passes, busy: int) -> Iterator[BusyCores | None]:
    """Copies of this process, `busy` processes in all, that run the same passes; None where these cannot be had."""
    if not busy or load_obstacle(busy):
        yield None
    else:
        with passes.busy_cores(busy) as load:
            yield load


def _passes(
    job: Job, traced: TracedModel, minibatch: int, options: ProfilerOptions, progress: Progress, group: MeasuringGroup
) -> Passes:
    if options.device == "cuda":
        torch.cuda.empty_cache()  # blocks that were kept for another size would not fit this one
    device = torch.device(options.device)
    job.model.to(device).train()
    if traced.loss_state is not None:
        traced.loss_state.to(device)
    batch = _batch(job, minibatch, device)
    run = LayerRun(traced, batch, training_loss(job, batch), minibatch, device)
    return Passes(job, run, _clock(options), progress, group)


def _clock(options: ProfilerOptions) -> Clock:
    return CUDAClock() if options.device == "cuda" else CPUClock(options.threads, options.processes)


def _batch(job: Job, minibatch: int, device: torch.device) -> Batch:
    batch = job.example_batch(minibatch)

    def move(value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

    return Batch(move(batch.inputs), move(batch.target), batch.names)


def _measure(passes: Passes, saved: dict[str, int], options: ProfilerOptions, aim: Aim, busy: int) -> MeasuredSize:
    """Measure a size after its first pass, in which every layer `saved` so many bytes for backward."""
    passes.warm_up(options.warmup)
    with _load(passes, busy) as load:
        samples, loaded = passes.measure(options.repeats, aim, load)
    run = passes.run
    return MeasuredSize(
        run.traced,
        run.minibatch,
        samples,
        aim,
        saved,
        run.alike,
        passes.overhead,
        passes.warmed,
        passes.workspaces(),
        waits=options.processes > 1 and options.threads > 1,
        loaded=None if load is None or load.lost else loaded,
    )


def _profile(
    ref: str,
    job: Job,
    checked: CheckedTraining,
    measured: Sequence[MeasuredSize],
    steps: StepCost,
    options: ProfilerOptions,
    remarks: Sequence[str],
    read_s: float,
) -> Profile:
    sizes = [size.size(steps) for size in measured]
    traced = checked.traced
    return profile_from(
        ref,
        job,
        traced,
        options.granularity,
        sizes,
        _provenance(options, job, measured, [*remarks, *layer_sum_remarks(sizes[0])]),
        graph_hash=traced.graph_hash,
        step_s=steps.fixed_s,
        work=counted_work(job, traced, sizes[0].minibatch),
        whole_forward_s=sizes[0].whole_forward_s,
        whole_backward_s=sizes[0].whole_backward_s,
        peak_bytes=steps.peak_bytes,
        read_s=read_s,
        taken_whole=checked.taken_whole,
        unchecked=checked.outcome.skipped,
    )


def _provenance(
    options: ProfilerOptions, job: Job, measured: Sequence[MeasuredSize], remarks: Sequence[str]
) -> dict[str, Any]:
    first = measured[0]
    busy = load_processes(options) if first.loaded is not None else 0
    notes = dict.fromkeys(
        f"at microbatch {size.minibatch}, {note}" if len(measured) > 1 else note
        for size in measured
        for note in sample_notes(size.samples, size.aim)
    )
    return {
        "kind": "measured",
        "device": options.device,
        "device_name": torch.cuda.get_device_name() if options.device == "cuda" else local_processors().name,
        "how": _method(options, job, first, busy),
        "threads": options.threads,
        "warmup": first.warmed,
        "repeats": first.samples.passes,
        "processes": options.processes,
        "notes": (*notes, *remarks),
        "load_processes": busy,
    }


def _method(options: ProfilerOptions, job: Job, first: MeasuredSize, busy: int) -> str:
    """The method of measurement, as text for people."""
    how = (
        f"each layer by itself, in full forward and backward passes over the model; {_clock(options).how}; median and "
        f"interquartile range of {first.samples.passes} passes after {first.warmed} to warm up; less the time of an "
        f"empty layer, {first.overhead.forward_s * 1e6:.1f} µs forward and "
        f"{first.overhead.backward_s * 1e6:.1f} µs backward, which a stage spends once"
    )
    if first.alike:
        how += "; of several layers that are the same computation only one was measured"
    if options.processes > 1:
        how += "; medians over the processes"
    if first.loaded is not None:
        how += f"; in turns also {first.loaded.passes} passes while {busy} processes ran the same"
    if first.waits:
        how += ", with the time that a pass spends waiting for cores spread over its layers"
    if job.loss is None or job.data is None:
        how += "; without a loss or targets, the backward pass starts from the sum of the outputs"
    return how
