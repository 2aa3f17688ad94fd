"""Profile a model: trace it, run it layer by layer and as a whole, and write down medians."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeplan import __version__
from pipeplan.errors import InputError
from pipeplan.profile import Layer, Profile, Provenance
from pipeplan.profile import Tensor as Edge
from pipeplan.profiler.clock import Clock, CPUClock, CUDAClock, median, spread
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.optimizer import optimizer_state
from pipeplan.profiler.passes import Passes, Progress, Samples
from pipeplan_launch.allocator import keep_freed_memory
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job import Batch, Job
from pipeplan_launch.loading import canonical_ref, load_job
from pipeplan_launch.trace import TracedModel, trace


@dataclass(frozen=True)
class Options:
    """How to measure."""

    batches: tuple[int, ...] = ()
    """Samples in a minibatch: the size of the profile, and others to measure in the same run; the job's own by default.
    """
    device: str = "cpu"
    threads: int = 1
    """Threads that torch computes with on the CPU."""
    repeats: int | None = None
    """Measured passes; as many as fit in `BUDGET_S` by default."""
    warmup: int = 2
    """Passes before those; one is enough where they are long."""
    seed: int = 0
    granularity: str = "layer"
    """What one layer is: `module`, `layer` or `op`."""

    @property
    def minibatch(self) -> int | None:
        """The size of the profile, if one was given."""
        return self.batches[0] if self.batches else None


def profile_model(ref: str, options: Options, progress: Progress = lambda done, total, what: None) -> Profile:
    """Profile the model that `ref` names. Raises `InputError` for whatever is wrong with it or with the options."""
    _check(options)
    progress(0, 0, "loading the model")
    try:
        keep_freed_memory()
        torch.set_num_threads(options.threads)
        job = load_job(ref, options.seed)
        minibatch = options.minibatch or job.minibatch
        progress(0, 0, "tracing")
        traced = trace(job, minibatch, options.granularity)
        return _measure(ref, job, traced, minibatch, options, progress)
    except LaunchError as error:
        raise InputError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{ref!r} at minibatch {options.minibatch or 'default'} does not fit in the memory of {options.device}: "
            f"{' '.join(str(error).split())[:200]}; try a smaller --batch"
        ) from error


def _check(options: Options) -> None:
    counts = [*(("minibatch size", size) for size in options.batches), ("number of repeats", options.repeats)]
    for what, value in counts:
        if value is not None and value < 1:
            raise InputError(f"the {what} must be at least 1, not {value}")
    if options.threads < 1:
        raise InputError(f"the number of threads must be at least 1, not {options.threads}")
    if options.device not in ("cpu", "cuda"):
        raise InputError(f"there is no device {options.device!r}: write cpu or cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device that this torch can use: write --device cpu, or install a CUDA build")


def _measure(ref: str, job: Job, traced: TracedModel, minibatch: int, options: Options, progress: Progress) -> Profile:
    device = torch.device(options.device)
    clock: Clock = CUDAClock() if device.type == "cuda" else CPUClock(options.threads)
    job.model.to(device).train()
    batch = _batch(job, minibatch, device)
    loss = job.loss if job.loss is not None and batch.target is not None else sum_of_outputs
    run = LayerRun(traced, batch, loss, minibatch, device)
    passes = Passes(job, run, clock, progress)
    saved = passes.inspect(ref)
    repeats = passes.warm_up(options.warmup, options.repeats)
    samples = passes.measure(repeats)
    optimizer, ratio = optimizer_state(job)
    return Profile(
        layers=_layers(traced, samples, saved),
        tensors=_edges(traced, minibatch),
        minibatch=minibatch,
        model_ref=canonical_ref(ref),
        model_name=job.name,
        graph_hash=traced.graph_hash,
        dynamic_batch=traced.dynamic_batch,
        granularity=options.granularity,
        provenance=_provenance(options, passes, clock, repeats, has_loss=loss is job.loss),
        optimizer_name=optimizer,
        optimizer_state_ratio=ratio,
        together=traced.together,
        whole_forward_s=median(samples.whole_forward),
        whole_backward_s=median(samples.whole_backward),
    )


def _provenance(options: Options, passes: Passes, clock: Clock, repeats: int, *, has_loss: bool) -> Provenance:
    how = (
        f"each layer by itself, in full forward and backward passes over the model; {clock.how}; median and "
        f"interquartile range of {repeats} passes after {passes.warmed} to warm up; less what a call of an empty "
        f"layer takes, {passes.overhead.forward_s * 1e6:.1f} µs forward and {passes.overhead.backward_s * 1e6:.1f} µs "
        "backward, which a stage pays once"
    )
    if not has_loss:
        how += "; without a loss or targets, the backward pass starts from the sum of the outputs"
    return Provenance(
        kind="measured",
        device=options.device,
        device_name=torch.cuda.get_device_name() if options.device == "cuda" else cpu_name(),
        when=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        how=how,
        torch=torch.__version__,
        pipeplan=__version__,
        threads=options.threads,
        warmup=passes.warmed,
        repeats=repeats,
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

    return Batch(move(batch.inputs), move(batch.target))


def cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _layers(traced: TracedModel, samples: Samples, saved: dict[str, int]) -> tuple[Layer, ...]:
    sizes = {name: one.nbytes for name, one in traced.model.named_parameters()}
    buffers = {name: one.nbytes for name, one in traced.model.named_buffers()}
    charged: set[str] = set()
    layers = []
    for info in traced.layers:
        # A tied parameter is held once: its layers share a stage, and the first one is charged.
        own = [name for name in info.parameters if name not in charged]
        charged.update(own)
        layers.append(
            Layer(
                name=info.name,
                module=info.module,
                op=info.op,
                forward_s=median(samples.forward[info.name]),
                backward_s=median(samples.backward[info.name]),
                forward_spread_s=spread(samples.forward[info.name]),
                backward_spread_s=spread(samples.backward[info.name]),
                parameter_bytes=sum(sizes[name] for name in own),
                buffer_bytes=sum(buffers[name] for name in info.buffers),
                saved_bytes=saved.get(info.name, 0),
            )
        )
    return tuple(layers)


def _edges(traced: TracedModel, minibatch: int) -> tuple[Edge, ...]:
    return tuple(
        Edge(
            name=spec.name,
            producer=spec.producer,
            consumers=spec.consumers,
            bytes=spec.bytes(minibatch),
            gradient_bytes=spec.bytes(minibatch) if spec.requires_grad else 0,
        )
        for spec in traced.tensors
    )
