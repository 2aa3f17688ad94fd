"""Memory of a measured model: a limit for the process, and the memory that its layers use and keep.

Linux grants more memory than there is, and kills a process that uses too much. With a limit at the free memory
(`limited_memory`), the allocation fails instead, and torch reports how many bytes it requested.

The memory use of calls (`record_memory_use`) comes from the records of torch's allocator. On CUDA the allocator
keeps counters; on the CPU torch's profiler records every allocation and release. These numbers are exact and the same
in every run. The resident memory that the operating system reports is not, because freed blocks that fit no later
allocation stay resident. Neither record has memory that a library obtains without the allocator, such as packed
matrices inside a matrix product.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function

from pipeplan.errors import InputError
from pipeplan.profiler.layer_run import LayerRun, Measure
from pipeplan.util.units import show_size
from pipeplan_launch.telemetry.memory import read_text, resident_bytes
from pipeplan_launch.tracing.trace import TracedModel

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

USABLE_SHARE = 0.95
"""Share of the free memory that may be used. The rest is for memory that is not allocated through the C library."""
_REQUESTED = re.compile(r"tried to allocate (\d+) bytes")
_OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "could not create a memory")
CALL_LABEL = "pipeplan call"
"""Label of a measured call in the profiler's records."""


@contextmanager
def limited_memory(free: int | None) -> Iterator[None]:
    """Context that limits this process to `free` · `USABLE_SHARE` further bytes, on Linux.

    Does nothing if the system has no such limit, or if `free` is None.
    """
    status = read_text(Path("/proc/self/status"))
    data = next((line.split()[1] for line in status.splitlines() if "VmData" in line), None)
    if resource is None or free is None or data is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(data) * 1024 + int(free * USABLE_SHARE)
    ceilings = [ceiling for ceiling in (soft, hard) if ceiling != resource.RLIM_INFINITY]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (min(limit, *ceilings) if ceilings else limit, hard))
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def failed_allocation_bytes(error: BaseException | None) -> int | None:
    """Bytes of the failed allocation that caused an error (0: unknown); None if no allocation failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error)
        if isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY):
            requested = _REQUESTED.search(text)
            return int(requested[1]) if requested else 0
        error = error.__cause__ or error.__context__
    return None


def out_of_memory_message(ref: str, minibatch: int | None, where: str, traced: TracedModel | None) -> str:
    """The message for a model that does not fit. `where` names the memory and says what is known about it."""
    at = f" at microbatch {minibatch}" if minibatch else ""
    need = f"; {step_memory_text(traced, minibatch)}" if traced is not None and minibatch else ""
    return f"{ref!r}{at} does not fit in {where}{need}; try a smaller --microbatch"


def process_memory_text(free: int | None, resident: int, requested: int) -> str:
    """The memory of this process, in words.

    `resident` is the memory in use when `free` bytes were free. `requested` is the size of the failed allocation (0:
    unknown).
    """
    if free is None:
        return "memory while it is profiled"
    used = f"of {show_size(free)} that were free, {show_size(max(0, resident_bytes() - resident))} are in use"
    more = f" and {show_size(requested)} more were requested" if requested else ""
    return f"memory while it is profiled: {used}{more}"


def step_memory_text(traced: TracedModel, minibatch: int) -> str:
    """A lower bound on the memory of a training step, in words: weights, gradients and activations."""
    weights = sum(parameter.nbytes for parameter in traced.model.parameters())
    trained = sum(parameter.nbytes for parameter in traced.model.parameters() if parameter.requires_grad)
    activations = sum(spec.bytes(minibatch) for spec in traced.tensors)
    return (
        f"it needs about {show_size(weights + trained + activations)}: {show_size(weights)} of weights, "
        f"{show_size(trained)} of gradients, {show_size(activations)} of activations, and more while the layers run"
    )


def check_fits_in_memory(ref: str, traced: TracedModel, minibatch: int, free: int | None) -> None:
    """Raise `InputError` if half of the activations that need gradients exceed the free memory.

    A backward pass needs most of these activations, so the model would fill the memory and then fail.
    """
    least = sum(spec.bytes(minibatch) for spec in traced.tensors if spec.requires_grad) // 2
    if free is not None and least > free:
        raise InputError(
            f"{ref!r} at microbatch {minibatch} does not fit in memory: {step_memory_text(traced, minibatch)}, and "
            f"{show_size(free)} are free; try a smaller --microbatch"
        )


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one call, in bytes beyond the memory in use before it."""

    most: int
    """Peak during the call."""
    left: int
    """Still in use after the call."""


def record_memory_use(device: torch.device, run: Callable[[Measure], object]) -> list[MemoryUse]:
    """Memory use of each call that `run` makes through the given `Measure`, in order; empty if nothing was recorded."""
    if device.type == "cuda":
        uses: list[MemoryUse] = []
        run(_measure_on_cuda(uses))
        return uses

    def measure(call: Callable[[], None]) -> Callable[[], float]:
        with record_function(CALL_LABEL):
            call()
        return lambda: 0.0

    # At lower levels the profiler's library prints on standard error when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(use_cpu=True, profile_memory=True) as profiled:
        run(measure)
    return _uses_in(profiled)


def _measure_on_cuda(uses: list[MemoryUse]) -> Measure:
    def measure(call: Callable[[], None]) -> Callable[[], float]:
        # The allocator counts at the request for memory, so there is no need to wait for the device.
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        uses.append(MemoryUse(torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before))
        return lambda: 0.0

    return measure


def _uses_in(profiled: profile) -> list[MemoryUse]:
    """Memory use of each marked call in the profiler's records, in order."""
    results = getattr(profiled, "kineto_results", None)
    events = list(results.events()) if results is not None else []
    calls = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if event.name() == CALL_LABEL
    )
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    uses, position = [], 0
    for start, end in calls:
        inside = []
        while position < len(changes) and changes[position][0] <= end:
            if changes[position][0] >= start:
                inside.append(changes[position][1])
            position += 1
        uses.append(memory_use(inside))
    return uses


def memory_use(changes: Iterable[int]) -> MemoryUse:
    """Peak and final level of a sequence of allocations (positive) and releases (negative), in bytes."""
    levels = list(accumulate(changes, initial=0))
    return MemoryUse(max(levels), levels[-1])


def measure_workspaces(run: LayerRun, device: torch.device) -> dict[str, int]:
    """Workspace of every layer that runs, in bytes: the larger of forward and backward, from one pass.

    Empty if the device's allocator recorded nothing.
    """
    names: list[str] = []

    def run_both_passes(measure: Measure) -> None:
        names.extend(run.forward(measure))
        run.backward(measure)

    uses = record_memory_use(device, run_both_passes)
    if len(uses) != 2 * len(names):
        return {}
    layers = {layer.name: layer for layer in run.layers}
    workspaces = {}
    for name, forward, backward in zip(names, uses, reversed(uses), strict=False):
        layer = layers[name]
        gradients = sum(spec.bytes(run.minibatch) for spec in layer.receives if spec.requires_grad)
        gradients += sum(parameter.nbytes for parameter in layer.trained)
        workspaces[name] = max(0, forward.most - forward.left, backward.most - gradients)
    return workspaces


class SavedBytes:
    """Bytes that autograd saves, by layer.

    Every storage counts once, for the layer that saves it first. This is exact within a stage. If a cut separates two
    layers that save the same tensor, the later stage holds it as a received tensor. Tensors that are in memory anyway,
    such as parameters and buffers, do not count.
    """

    def __init__(self, not_counted: Iterable[Tensor]) -> None:
        self.by_layer: dict[str, int] = defaultdict(int)
        self._seen = {tensor.untyped_storage()._cdata for tensor in not_counted}
        # Keeps the tensors alive until the end of the pass: a new storage could get the address of a freed one.
        self._alive: list[Tensor] = []

    @contextmanager
    def watch(self, layer: str) -> Iterator[None]:
        """Context whose saved tensors count for the layer."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self._alive.append(tensor.detach())
                self.by_layer[layer] += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
