"""Profile a model: trace it, run it layer by layer and as a whole, and keep the medians of the times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from pipeplan._version import __version__
from pipeplan.cluster_data.devices import LOCAL_DEVICES
from pipeplan.cluster_data.local import local_processors
from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Provenance
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.busy_cores import load_obstacle
from pipeplan.profiler.clock import BRIEF, THOROUGH, Aim, Clock, CPUClock, CUDAClock, Samples, sample_notes
from pipeplan.profiler.concurrent import MeasuringGroup, SingleProcess, profile_concurrently
from pipeplan.profiler.estimate.flops import counted_work
from pipeplan.profiler.job_checks import check_data, check_training
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import (
    check_fits_in_memory,
    failed_allocation_bytes,
    limited_memory,
    out_of_memory_message,
    step_memory_text,
)
from pipeplan.profiler.optimizer_step import StepCost, optimizer_state
from pipeplan.profiler.options import ProfilerOptions, Progress, smaller_sizes
from pipeplan.profiler.outcome import (
    MeasuredSize,
    charged_parameters,
    cpu_name,
    has_batch_norm,
    tied_weights,
    training_lacks,
)
from pipeplan.profiler.overhead import copies_remarks, copies_seconds
from pipeplan.profiler.passes import Passes, training_loss
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
from pipeplan_launch.job.seeds import RandomState
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.job_reference import canonical_reference, job_file
from pipeplan_launch.telemetry.free_memory import free_bytes
from pipeplan_launch.telemetry.memory import resident_bytes
from pipeplan_launch.tracing.trace import TracedModel

LOST = "a process that kept a core busy has ended"
MAX_PROCESSES = 256
"""Most processes that may be asked for. A larger number is taken for a typing error."""


def profile_model(ref: str, options: ProfilerOptions, progress: Progress = lambda done, total, what: None) -> Profile:
    """Profile the model that `ref` names, or estimate its profile for a device that is not this machine's.

    Raises `InputError` if the model cannot be profiled, or if an option is wrong.
    """
    if options.device not in LOCAL_DEVICES:
        from pipeplan.profiler.estimate import estimate_model

        return estimate_model(ref, options, progress)
    _check(options)
    if options.processes > 1:
        progress(0, 0, f"starting {options.processes} processes")
        return profile_concurrently(ref, options, progress)
    return profile_in_process(ref, options, progress, SingleProcess())


def profile_in_process(ref: str, options: ProfilerOptions, progress: Progress, company: MeasuringGroup) -> Profile:
    """Profile the model in this process, at the same time as the other processes of `company`.

    Raises `InputError`, which says how much memory is needed if the model does not fit.
    """
    traced_models: list[TracedModel] = []
    free = free_bytes() if options.device == "cpu" else None
    free = None if free is None else free // company.processes
    resident = resident_bytes()
    try:
        with limited_memory(free):
            return _trace_and_measure(ref, options, progress, company, free, traced_models)
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
    company: MeasuringGroup,
    free: int | None,
    traced_models: list[TracedModel],
) -> Profile:
    """Profile the model. The traced model is appended to `traced_models`, for messages if a later step fails."""
    progress(0, 0, "loading the model")
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    job = load_job(ref, options.seed)
    sizes = options.batches or (job.minibatch,)
    checked = check_training(
        job, sizes[0], options, free, progress, lambda traced: _check_data(job, traced, sizes[0], options.seed)
    )
    traced = checked.traced
    traced_models.append(traced)
    if len(sizes) > 1 and not traced.dynamic_batch:
        raise InputError(
            f"{ref!r} can only be traced for one microbatch size at a time: give --microbatch one number, and measure "
            "the others in runs of their own"
        )
    check_fits_in_memory(ref, traced, max(sizes), free)
    measured, first_passes, busy = [], None, _load_processes(options)
    remarks = [*lacking_remarks(job), *checked.remarks, *unread_parameter_remarks(traced), *tie_remarks(traced)]
    remarks += evaluation_remarks(job, traced)
    for size in sizes:
        passes = _passes(job, traced, size, options, progress, company)
        saved = passes.inspect(ref, measure_all=options.measure_all)
        if first_passes is None:
            first_passes = passes
            remarks += promise_remarks(job, traced, passes.run.batch)
        measured.append(_measure(passes, saved, options, THOROUGH, busy))
    assert first_passes is not None
    for size in smaller_sizes(sizes, options.halvings) if traced.dynamic_batch else []:
        try:
            passes = _passes(job, traced, size, options, progress, company)
            saved = passes.inspect(ref, measure_all=options.measure_all)
            measured.append(_measure(passes, saved, options, BRIEF, busy))
        except Exception as error:  # the model works at its own size, so that a smaller one is not needed
            why = error if isinstance(error, (InputError, LaunchError)) else describe_error(error)
            remarks.append(f"microbatch {size}, and anything smaller, was not measured: {why}")
            break
    remarks += batch_norm_remarks(traced, len(measured))
    remarks += copies_remarks(copies_seconds(first_passes.run, first_passes.clock), measured[0].forward_s)
    read_s = _reading_s(first_passes, remarks)
    steps = _steps(first_passes, charged_parameters(traced), busy)
    if busy and any(size.loaded is None for size in measured):
        remarks.append(f"times with all cores busy were not measured: {load_obstacle(busy) or LOST}")
        measured = [replace(size, loaded=None) for size in measured]
    profile = _profile(ref, job, measured, steps, options, remarks)
    return replace(profile, read_s=read_s, taken_whole=checked.taken_whole, unchecked=checked.unchecked)


def _check_data(job: Job, traced: TracedModel, minibatch: int, seed: int) -> None:
    """Raise `LaunchError` for data that a run would refuse. A sample that cannot be read is left to `_reading_s`."""
    random_state = RandomState.now(torch.device("cpu"))
    try:
        check_data(job, traced, minibatch, seed)
    except (LaunchError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:
        return
    finally:
        random_state.restore()


def _reading_s(passes: Passes, remarks: list[str]) -> float:
    """Time of reading a minibatch; 0, and a remark, where the job's data fails on samples that nothing else reads."""
    try:
        return passes.reading()
    except Exception as error:
        why = error if isinstance(error, (InputError, LaunchError)) else describe_error(error)
        remarks.append(f"reading samples was not measured, and would fail in training: {why}")
        return 0.0


def _load_processes(options: ProfilerOptions) -> int:
    """Busy processes while times under load are measured, one for each core; 0 where no such times are."""
    wanted = options.load and options.device == "cpu" and options.threads == 1 and options.processes == 1
    cores = local_processors().cores if wanted else 0
    return cores if cores > 1 else 0


def _check(options: ProfilerOptions) -> None:
    counts = [
        *(("microbatch size", size) for size in options.batches),
        ("number of repeats", options.repeats),
        ("number of processes", options.processes),
        ("number of threads", options.threads),
    ]
    for name, value in counts:
        if value is not None and value < 1:
            raise InputError(f"the {name} must be at least 1, not {value}")
    if options.halvings < 0:
        raise InputError(f"the number of halvings must be at least 0, not {options.halvings}")
    if options.processes > MAX_PROCESSES:
        raise InputError(f"the number of processes must be at most {MAX_PROCESSES}, not {options.processes}")
    if len(set(options.batches)) < len(options.batches):
        raise InputError(f"a microbatch size is given twice: {', '.join(map(str, options.batches))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device that this torch can use: write --device cpu, or install a CUDA build")
    if options.device == "cuda" and options.processes > 1:
        raise InputError("--processes is for the CPU, which the workers of a machine share: leave it out with cuda")


def _passes(
    job: Job, traced: TracedModel, minibatch: int, options: ProfilerOptions, progress: Progress, company: MeasuringGroup
) -> Passes:
    if options.device == "cuda":
        torch.cuda.empty_cache()  # blocks that were kept for another size would not fit this one
    device = torch.device(options.device)
    clock: Clock = CUDAClock() if device.type == "cuda" else CPUClock(options.threads, company.processes)
    job.model.to(device).train()
    if traced.loss_state is not None:
        traced.loss_state.to(device)
    batch = _batch(job, minibatch, device)
    run = LayerRun(traced, batch, training_loss(job, batch), minibatch, device)
    return Passes(job, run, clock, progress, company)


def _measure(passes: Passes, saved: dict[str, int], options: ProfilerOptions, aim: Aim, busy: int) -> MeasuredSize:
    """Measure a size after its first pass, in which every layer `saved` so many bytes for backward."""
    passes.warm_up(options.warmup)
    samples, loaded = _measured_passes(passes, options.repeats, aim, busy)
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
        waits=passes.company.processes > 1 and options.threads > 1,
        loaded=loaded,
    )


def _measured_passes(passes: Passes, repeats: int | None, aim: Aim, busy: int) -> tuple[Samples, Samples | None]:
    """The measured passes alone, and with so many busy processes in all; None where these cannot be had."""
    if not busy or load_obstacle(busy):
        return passes.measure(repeats, aim)
    with passes.busy_cores(busy) as load:
        alone, loaded = passes.measure(repeats, aim, load)
        return alone, None if load.lost else loaded


def _steps(passes: Passes, own: Mapping[str, Sequence[str]], busy: int) -> StepCost:
    """The optimiser's steps, likewise."""
    if not busy or load_obstacle(busy):
        return passes.steps(own)
    with passes.busy_cores(busy) as load:
        return passes.steps(own, load)


def _profile(
    ref: str,
    job: Job,
    measured: Sequence[MeasuredSize],
    steps: StepCost,
    options: ProfilerOptions,
    remarks: Sequence[str],
) -> Profile:
    optimizer, ratio = optimizer_state(job)
    first, *others = (size.size(steps) for size in measured)
    traced = measured[0].traced
    return Profile(
        layers=first.layers,
        tensors=first.tensors,
        minibatch=first.minibatch,
        model_ref=canonical_reference(ref),
        model_file=job_file(ref),
        model_name=job.name,
        graph_hash=traced.graph_hash,
        dynamic_batch=traced.dynamic_batch,
        granularity=options.granularity,
        provenance=_provenance(options, job, measured, [*remarks, *layer_sum_remarks(first)]),
        optimizer_name=optimizer,
        optimizer_state_ratio=ratio,
        step_s=steps.fixed_s,
        together=traced.together,
        tied=tied_weights(traced),
        batch_norm=has_batch_norm(traced),
        lacks=training_lacks(job),
        work=counted_work(job, traced, first.minibatch),
        whole_forward_s=first.whole_forward_s,
        whole_backward_s=first.whole_backward_s,
        peak_bytes=steps.peak_bytes,
        sizes=tuple(others),
    )


def _provenance(
    options: ProfilerOptions, job: Job, measured: Sequence[MeasuredSize], remarks: Sequence[str]
) -> Provenance:
    first = measured[0]
    clock = CUDAClock() if options.device == "cuda" else CPUClock(options.threads, options.processes)
    how = (
        f"each layer by itself, in full forward and backward passes over the model; {clock.how}; median and "
        f"interquartile range of {first.samples.passes} passes after {first.warmed} to warm up; less the time of an "
        f"empty layer, {first.overhead.forward_s * 1e6:.1f} µs forward and "
        f"{first.overhead.backward_s * 1e6:.1f} µs backward, which a stage spends once"
    )
    if first.alike:
        how += "; of several layers that are the same computation only one was measured"
    if options.processes > 1:
        how += "; medians over the processes"
    if first.loaded is not None:
        how += f"; in turns also {first.loaded.passes} passes while {_load_processes(options)} processes ran the same"
    if first.waits:
        how += ", with the time that a pass spends waiting for cores spread over its layers"
    if job.loss is None or job.data is None:
        how += "; without a loss or targets, the backward pass starts from the sum of the outputs"
    notes = dict.fromkeys(
        f"at microbatch {size.minibatch}, {note}" if len(measured) > 1 else note
        for size in measured
        for note in sample_notes(size.samples, size.aim)
    )
    return Provenance(
        kind="measured",
        device=options.device,
        device_name=torch.cuda.get_device_name() if options.device == "cuda" else cpu_name(),
        when=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        how=how,
        torch=torch.__version__,
        pipeplan=__version__,
        threads=options.threads,
        warmup=first.warmed,
        repeats=first.samples.passes,
        processes=options.processes,
        notes=(*notes, *remarks),
        traced=first.traced.how,
        load_processes=0 if first.loaded is None else _load_processes(options),
    )


def _batch(job: Job, minibatch: int, device: torch.device) -> Batch:
    batch = job.example_batch(minibatch)

    def move(value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

    return Batch(move(batch.inputs), move(batch.target), batch.names)
