"""Profile a model: measure it on this machine, or estimate it for another device.

A measurement traces the model, runs it layer by layer and as a whole, and keeps medians of the times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeplan.cluster_data.devices import LOCAL_DEVICES
from pipeplan.cluster_data.local import local_processors
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.busy_cores import BusyCores, load_obstacle
from pipeplan.profiler.clock import BRIEF, THOROUGH, Aim, Clock, CPUClock, CUDAClock, sample_notes
from pipeplan.profiler.estimate.estimator import estimate_model
from pipeplan.profiler.estimate.flops import counted_work
from pipeplan.profiler.job_checks import CheckedTraining, check_training, reading_s
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import (
    check_fits_in_memory,
    failed_allocation_bytes,
    limited_memory,
    out_of_memory_message,
    process_memory_text,
)
from pipeplan.profiler.optimizer_step import StepCost
from pipeplan.profiler.options import ProfilerOptions, Progress, smaller_sizes
from pipeplan.profiler.outcome import MeasuredSize, charged_parameters, profile_from
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
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch, Job
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.telemetry.memory import free_bytes, keep_freed_memory, resident_bytes
from pipeplan_launch.tracing.trace import TracedModel

LOST = "a process that kept a core busy has ended"


def profile_model(ref: str, options: ProfilerOptions, progress: Progress = lambda done, total, what: None) -> Profile:
    """Profile the model that `ref` names, or estimate its profile for a device that this machine does not have.

    Raises `InputError` if the model cannot be profiled, or if an option is wrong. If the model does not fit in memory,
    the error says how much is needed.
    """
    _check(options)
    if options.device not in LOCAL_DEVICES:
        return estimate_model(ref, options, progress)
    measurement, resident = _Measurement(ref, options, progress), resident_bytes()
    try:
        with limited_memory(measurement.free):
            return measurement.profile()
    except Exception as error:
        traced = measurement.traced
        minibatch = options.minibatch or (traced.minibatch if traced else None)
        if isinstance(error, torch.OutOfMemoryError):
            where = f"the memory of {options.device}: {' '.join(str(error).split())[:200]}"
            raise InputError(out_of_memory_message(ref, minibatch, where, traced)) from error
        requested = failed_allocation_bytes(error)
        if requested is not None:
            where = process_memory_text(measurement.free, resident, requested)
            largest = max(options.batches, default=minibatch)
            raise InputError(out_of_memory_message(ref, largest, where, traced)) from error
        if isinstance(error, LaunchError):
            raise InputError(str(error)) from error
        raise


def _check(options: ProfilerOptions) -> None:
    counts = [
        *(("microbatch size", size) for size in options.batches),
        ("number of repeats", options.repeats),
        ("number of threads", options.threads),
    ]
    for name, value in counts:
        if value is not None and value < 1:
            raise InputError(f"the {name} must be at least 1, not {value}")
    if options.halvings < 0:
        raise InputError(f"the number of halvings must be at least 0, not {options.halvings}")
    if len(set(options.batches)) < len(options.batches):
        raise InputError(f"a microbatch size is given twice: {', '.join(map(str, options.batches))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device that this torch can use: write --device cpu, or install a CUDA build")


class _Measurement:
    """The measurement of one model, with the results so far."""

    job: Job

    def __init__(self, ref: str, options: ProfilerOptions, progress: Progress) -> None:
        self.ref, self.options, self.progress = ref, options, progress
        self.free = free_bytes() if options.device == "cpu" else None
        """Free memory in bytes; None if unknown."""
        self.busy = load_processes(options)
        self.traced: TracedModel | None = None
        self.remarks: list[str] = []
        self.measured: list[MeasuredSize] = []

    def profile(self) -> Profile:
        """Trace the model, check it, and measure it at all sizes."""
        options, remarks = self.options, self.remarks
        self.progress(0, 0, "loading the model")
        keep_freed_memory()
        torch.set_num_threads(options.threads)
        job = self.job = load_job(self.ref, options.seed)
        sizes = options.batches or (job.minibatch,)
        checked = check_training(job, sizes[0], options, self.free, self.progress)
        traced = self.traced = checked.traced
        if len(sizes) > 1 and not traced.dynamic_batch:
            raise InputError(
                f"{self.ref!r} can only be traced for one microbatch size at a time: give --microbatch one number, and "
                "measure the others in runs of their own"
            )
        check_fits_in_memory(self.ref, traced, max(sizes), self.free)
        remarks += [*lacking_remarks(job), *checked.remarks, *unread_parameter_remarks(traced), *tie_remarks(traced)]
        remarks += evaluation_remarks(job, traced)
        first = self._measure(traced, sizes[0], THOROUGH)
        for size in sizes[1:]:
            self._measure(traced, size, THOROUGH)
        for size in smaller_sizes(sizes, options.halvings) if traced.dynamic_batch else []:
            try:
                self._measure(traced, size, BRIEF)
            except Exception as error:  # the model works at its own size, so a smaller size is not required
                remarks.append(f"microbatch {size}, and anything smaller, was not measured: {_reason(error)}")
                break
        remarks += batch_norm_remarks(traced, len(self.measured))
        read_s = self._reading_s(first)
        with _load(first, self.busy) as load:
            steps = first.steps(charged_parameters(traced), load)
        return self._profile(checked, steps, read_s)

    def _measure(self, traced: TracedModel, minibatch: int, aim: Aim) -> Passes:
        """Measure the model at one size, after a first pass that inspects it. Returns its `Passes`."""
        options = self.options
        passes = self._passes(traced, minibatch)
        saved = passes.inspect(self.ref)
        if not self.measured:
            self.remarks += promise_remarks(self.job, traced, passes.run.batch)
        passes.warm_up(options.warmup)
        with _load(passes, self.busy) as load:
            samples, loaded = passes.measure(options.repeats, aim, load)
        self.measured.append(
            MeasuredSize(
                traced,
                minibatch,
                samples,
                aim,
                saved,
                passes.run.alike,
                passes.overhead,
                passes.warmed,
                passes.workspaces(),
                loaded=None if load is None or load.lost else loaded,
            )
        )
        return passes

    def _passes(self, traced: TracedModel, minibatch: int) -> Passes:
        if self.options.device == "cuda":
            torch.cuda.empty_cache()  # blocks that were kept for another size would not fit this one
        job, device = self.job, torch.device(self.options.device)
        job.model.to(device).train()
        if traced.loss_state is not None:
            traced.loss_state.to(device)
        batch = _batch(job, minibatch, device)
        run = LayerRun(traced, batch, training_loss(job, batch), minibatch, device)
        return Passes(job, run, _clock(self.options), self.progress)

    def _reading_s(self, passes: Passes) -> float:
        """Seconds for reading a minibatch; 0 on a GPU, which computes meanwhile, and if reading fails."""
        if self.options.device != "cpu":
            return 0.0
        self.progress(0, 0, "reading samples")
        try:
            return reading_s(self.job, passes.run.minibatch, passes.clock, passes.eviction.run)
        except Exception as error:
            self.remarks.append(f"reading samples was not measured, and would fail in training: {_reason(error)}")
            return 0.0

    def _profile(self, checked: CheckedTraining, steps: StepCost, read_s: float) -> Profile:
        measured, traced = self.measured, checked.traced
        if self.busy and any(size.loaded is None for size in measured):
            why = load_obstacle(self.busy) or LOST
            self.remarks.append(f"times with all cores busy were not measured: {why}")
            measured = [replace(size, loaded=None) for size in measured]
        sizes = [size.size(steps) for size in measured]
        remarks = [*self.remarks, *layer_sum_remarks(sizes[0])]
        return profile_from(
            self.ref,
            self.job,
            traced,
            self.options.granularity,
            sizes,
            _provenance(self.options, self.job, measured, remarks),
            graph_hash=traced.graph_hash,
            step_s=steps.fixed_s,
            work=counted_work(self.job, traced, sizes[0].minibatch),
            whole_forward_s=sizes[0].whole_forward_s,
            whole_backward_s=sizes[0].whole_backward_s,
            whole_split_s=sizes[0].whole_split_s,
            peak_bytes=steps.peak_bytes,
            read_s=read_s,
            taken_whole=checked.taken_whole,
            unchecked=checked.outcome.skipped,
        )


def load_processes(options: ProfilerOptions) -> int:
    """Number of busy processes while times under load are measured, one for each core; 0 if they are not measured."""
    wanted = options.load and options.device == "cpu" and options.threads == 1
    cores = local_processors().cores if wanted else 0
    return cores if cores > 1 else 0


@contextmanager
def _load(passes: Passes, busy: int) -> Iterator[BusyCores | None]:
    """Copies of this process that run the same passes, with `busy` processes in total; None if they cannot be made."""
    if not busy or load_obstacle(busy):
        yield None
    else:
        with BusyCores(busy, passes.job.model, lambda: passes.run_both(None)) as load:
            yield load


def _clock(options: ProfilerOptions) -> Clock:
    return CUDAClock() if options.device == "cuda" else CPUClock(options.threads)


def _batch(job: Job, minibatch: int, device: torch.device) -> Batch:
    batch = job.example_batch(minibatch)

    def move(value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

    return Batch(move(batch.inputs), move(batch.target), batch.names)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, (InputError, LaunchError)) else describe_error(error)


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
        "notes": (*notes, *remarks),
        "load_processes": busy,
    }


def _method(options: ProfilerOptions, job: Job, first: MeasuredSize, busy: int) -> str:
    """The method of measurement, as text for the user."""
    how = (
        f"each layer by itself, in full forward and backward passes over the model; {_clock(options).how}; median and "
        f"interquartile range of {first.samples.passes} passes after {first.warmed} to warm up; less the time of an "
        f"empty layer, {first.overhead.forward_s * 1e6:.1f} µs forward and "
        f"{first.overhead.backward_s * 1e6:.1f} µs backward, which a stage spends once"
    )
    if first.alike:
        how += "; of several layers that are the same computation only one was measured"
    if first.loaded is not None:
        how += f"; in turns also {first.loaded.passes} passes while {busy} processes ran the same"
    if job.loss is None or job.data is None:
        how += "; without a loss or targets, the backward pass starts from the sum of the outputs"
    return how
