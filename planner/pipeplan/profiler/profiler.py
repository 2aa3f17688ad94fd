"""Profile a model: trace it, run it layer by layer and as a whole, and write down medians.

What a reader of a measured profile should know of the model, besides how steady the times were.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from pipeplan._version import __version__
from pipeplan.cluster_data.devices import LOCAL_DEVICES
from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Provenance, Size
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.clock import Clock, CPUClock, CUDAClock
from pipeplan.profiler.concurrent import Alone, Company, profile_together
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import complaint, free_bytes, lacked, needed, refuse_the_hopeless, within
from pipeplan.profiler.optimizer_step import StepCost, optimizer_state
from pipeplan.profiler.options import Options, Progress
from pipeplan.profiler.outcome import Measured, cpu_name, own_parameters
from pipeplan.profiler.passes import Passes, notes_on
from pipeplan_launch.allocator import keep_freed_memory
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch, Job
from pipeplan_launch.job.loading import canonical_reference, load_job
from pipeplan_launch.telemetry.memory import resident_bytes
from pipeplan_launch.tracing.trace import TracedModel, trace_job

AGREES = 0.1
"""The share by which the sum of the layers may differ from the whole model before it is worth a sentence."""
MOST_NAMES = 3


def unread_parameters(traced: TracedModel) -> list[str]:
    """A sentence on parameters that the outputs do not depend on: they are in no stage, and are never trained."""
    read = {name for info in traced.layers for name in info.parameters}
    unread = [name for name, _ in traced.model.named_parameters() if name not in read]
    if not unread:
        return []
    more = f" and {len(unread) - MOST_NAMES} more" if len(unread) > MOST_NAMES else ""
    return [f"no output depends on these parameters, which are in no layer: {', '.join(unread[:MOST_NAMES])}{more}"]


def sum_against_whole(size: Size) -> list[str]:
    """A sentence where the layers by themselves do not add up to the model as its author wrote it."""
    sums = {
        "forward": (sum(layer.forward_s for layer in size.layers), size.whole_forward_s),
        "backward": (sum(layer.backward_s for layer in size.layers), size.whole_backward_s),
    }
    off = [
        f"{found / whole:.2f} of it {way}" for way, (found, whole) in sums.items() if _is_off(found, whole) and whole
    ]
    if not off:
        return []
    what = " and ".join(off)
    why = "very short layers cost more by themselves, and a busy machine slows some passes more than others"
    return [f"the layers do not add up to the whole model, {what}: {why}"]


def _is_off(found: float, whole: float | None) -> bool:
    return whole is not None and whole > 0 and abs(found / whole - 1) > AGREES


MOST_PROCESSES = 256
"""More than these are a slip of the finger."""


def profile_model(ref: str, options: Options, progress: Progress = lambda done, total, what: None) -> Profile:
    """Profile the model that `ref` names. Raises `InputError` for whatever is wrong with it or with the options."""
    if options.device not in LOCAL_DEVICES:
        from pipeplan.profiler.estimate import estimate_model

        return estimate_model(ref, options, progress)
    _check(options)
    if options.processes > 1:
        progress(0, 0, f"starting {options.processes} processes")
        return profile_together(ref, options, progress)
    return profile_here(ref, options, progress, Alone())


def profile_here(ref: str, options: Options, progress: Progress, company: Company) -> Profile:
    """Profile it in this process, at the same time as the company."""
    made: list[TracedModel] = []
    free = free_bytes() if options.device == "cpu" else None
    free = None if free is None else free // company.processes
    before = resident_bytes()
    try:
        with within(free):
            return _profile_here(ref, options, progress, company, free, made)
    except Exception as error:
        asked = lacked(error)
        traced = made[0] if made else None
        minibatch = options.minibatch or (traced.minibatch if traced else None)
        if isinstance(error, torch.OutOfMemoryError):
            what = " ".join(str(error).split())[:200]
            need = f"; {needed(traced, minibatch)}" if traced is not None and minibatch else ""
            at = f" at minibatch {minibatch}" if minibatch else ""
            raise InputError(
                f"{ref!r}{at} does not fit in the memory of {options.device}: {what}{need}; try a smaller --batch"
            ) from error
        if asked is not None:
            largest = max(options.batches, default=minibatch)
            raise InputError(complaint(ref, largest, free, before, asked, traced)) from error
        if isinstance(error, LaunchError):
            raise InputError(str(error)) from error
        raise


def _profile_here(
    ref: str, options: Options, progress: Progress, company: Company, free: int | None, made: list[TracedModel]
) -> Profile:
    progress(0, 0, "loading the model")
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    job = load_job(ref, options.seed)
    sizes = options.batches or (job.minibatch,)
    progress(0, 0, "tracing")
    traced = trace_job(job, sizes[0], options.granularity)
    made.append(traced)
    if len(sizes) > 1 and not traced.dynamic_batch:
        raise InputError(
            f"{ref!r} can only be traced for one minibatch size at a time: give --batch one number, and measure the "
            "others in runs of their own"
        )
    refuse_the_hopeless(ref, traced, max(sizes), free)
    found, first = [], None
    for size in sizes:
        if options.device == "cuda":
            torch.cuda.empty_cache()  # blocks kept for another size would not fit this one
        passes = _passes(job, traced, size, options, progress, company)
        first = first or passes
        found.append(_measure(ref, passes, options))
    assert first is not None
    return _profile(ref, job, found, first.steps(own_parameters(traced)), options)


def _check(options: Options) -> None:
    counts = [
        *(("minibatch size", size) for size in options.batches),
        ("number of repeats", options.repeats),
        ("number of processes", options.processes),
        ("number of threads", options.threads),
    ]
    for what, value in counts:
        if value is not None and value < 1:
            raise InputError(f"the {what} must be at least 1, not {value}")
    if options.processes > MOST_PROCESSES:
        raise InputError(f"the number of processes must be at most {MOST_PROCESSES}, not {options.processes}")
    if len(set(options.batches)) < len(options.batches):
        raise InputError(f"a minibatch size is given twice: {', '.join(map(str, options.batches))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device that this torch can use: write --device cpu, or install a CUDA build")
    if options.device == "cuda" and options.processes > 1:
        raise InputError("--processes is for the CPU, which the workers of a machine share: leave it out with cuda")


def _passes(
    job: Job, traced: TracedModel, minibatch: int, options: Options, progress: Progress, company: Company
) -> Passes:
    device = torch.device(options.device)
    clock: Clock = CUDAClock() if device.type == "cuda" else CPUClock(options.threads, company.processes)
    job.model.to(device).train()
    batch = _batch(job, minibatch, device)
    run = LayerRun(traced, batch, _loss(job, batch), minibatch, device)
    return Passes(job, run, clock, progress, company)


def _measure(ref: str, passes: Passes, options: Options) -> Measured:
    saved = passes.inspect(ref, measure_all=options.measure_all)
    passes.warm_up(options.warmup)
    samples = passes.measure(options.repeats)
    run = passes.run
    return Measured(
        run.traced,
        run.minibatch,
        samples,
        saved,
        run.alike,
        passes.overhead,
        passes.warmed,
        passes.workspaces(),
        waits=passes.company.processes > 1 and options.threads > 1,
    )


def _loss(job: Job, batch: Batch) -> Any:
    return job.loss if job.loss is not None and batch.target is not None else sum_of_outputs


def _profile(ref: str, job: Job, found: Sequence[Measured], steps: StepCost, options: Options) -> Profile:
    optimizer, ratio = optimizer_state(job)
    first, *others = (one.size(steps.update_s) for one in found)
    traced = found[0].traced
    return Profile(
        layers=first.layers,
        tensors=first.tensors,
        minibatch=first.minibatch,
        model_ref=canonical_reference(ref),
        model_name=job.name,
        graph_hash=traced.graph_hash,
        dynamic_batch=traced.dynamic_batch,
        granularity=options.granularity,
        provenance=_provenance(options, job, found, [*unread_parameters(traced), *sum_against_whole(first)]),
        optimizer_name=optimizer,
        optimizer_state_ratio=ratio,
        together=traced.together,
        whole_forward_s=first.whole_forward_s,
        whole_backward_s=first.whole_backward_s,
        peak_bytes=steps.peak_bytes,
        sizes=tuple(others),
    )


def _provenance(options: Options, job: Job, found: Sequence[Measured], remarks: Sequence[str]) -> Provenance:
    first = found[0]
    clock = CUDAClock() if options.device == "cuda" else CPUClock(options.threads, options.processes)
    how = (
        f"each layer by itself, in full forward and backward passes over the model; {clock.how}; median and "
        f"interquartile range of {first.samples.passes} passes after {first.warmed} to warm up; less what a call of an "
        f"empty layer takes, {first.overhead.forward_s * 1e6:.1f} µs forward and "
        f"{first.overhead.backward_s * 1e6:.1f} µs backward, which a stage pays once"
    )
    if first.alike:
        how += "; of layers that are the same computation one was measured"
    if options.processes > 1:
        how += "; medians over the processes"
    if first.waits:
        how += ", with the time that a pass spends waiting for cores spread over its layers"
    if job.loss is None or job.data is None:
        how += "; without a loss or targets, the backward pass starts from the sum of the outputs"
    notes = dict.fromkeys(
        f"at minibatch {one.minibatch}, {note}" if len(found) > 1 else note
        for one in found
        for note in notes_on(one.samples)
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
    )


def sum_of_outputs(output: Any, target: Any) -> Tensor:
    """A scalar to start a backward pass from, where there is no loss: the sum of all that a gradient can flow to."""
    leaves = [one for one in torch.utils._pytree.tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]
    if not leaves:
        raise LaunchError("no output of the model has a gradient: nothing in it can be trained")
    return torch.stack([one.float().sum() for one in leaves]).sum()


def _batch(job: Job, minibatch: int, device: torch.device) -> Batch:
    batch = job.example_batch(minibatch)

    def move(value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

    return Batch(move(batch.inputs), move(batch.target), batch.names)
