"""Memory that there is, on the CPU: what asks for more fails with a sentence, before the system ends the process.

Linux promises more memory than there is, and ends a process that uses it. Under a limit of what is free, asking fails
instead, and torch says how much was asked for.

What calls take of a device's memory, from the allocator's own records.

On CUDA the allocator counts; on the CPU torch's profiler notes what it hands out and takes back. That is exact and the
same in every run, which what the system calls resident is not: freed blocks that do not fit what comes next stay there.
What a library gets behind the allocator's back (packed matrices inside a product) is in neither.

What a layer takes while it runs beyond what it is given, makes and keeps.

Count the bytes that each layer keeps for the backward pass.
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
from pipeplan_launch.telemetry.memory import resident_bytes
from pipeplan_launch.tracing.trace import TracedModel

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

SHARE = 0.95
"""Of the free memory that may be used; the rest is for what is not asked for through the C library."""
_ASKED = re.compile(r"tried to allocate (\d+) bytes")
_LACKS = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "could not create a memory")


def free_bytes(root: Path = Path("/")) -> int | None:
    """What this process may still take: of the machine, and of the groups that it is in. None where nobody tells."""
    found = [_meminfo(root), *_groups(root)]
    return min((one for one in found if one is not None), default=None)


def _meminfo(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> Iterator[int | None]:
    """What control groups leave, version 1 and 2, from this process's own up to the outermost that it sees."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, most, now = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, most, now = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.strip("/")
        while True:
            yield _left(folder, most, now)
            if folder == top:
                break
            folder = folder.parent


def _left(folder: Path, most: str, now: str) -> int | None:
    limit, used = _text(folder / most).strip(), _text(folder / now).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None  # "max", or no such file
    # Files that were read are counted as used, and go when memory is asked for.
    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@contextmanager
def within(free: int | None) -> Iterator[None]:
    """Let this process ask for so many bytes more and no others, where the system has such a limit (Linux)."""
    data = next((line.split()[1] for line in _text(Path("/proc/self/status")).splitlines() if "VmData" in line), None)
    if resource is None or free is None or data is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(data) * 1024 + int(free * SHARE)
    ceilings = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (min(limit, *ceilings) if ceilings else limit, hard))
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lacked(error: BaseException | None) -> int | None:
    """The bytes that could not be had, where that is at the bottom of an error (0: it does not say); else None."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error)
        if isinstance(error, MemoryError) or any(sign in text for sign in _LACKS):
            asked = _ASKED.search(text)
            return int(asked[1]) if asked else 0
        error = error.__cause__ or error.__context__
    return None


def complaint(
    ref: str, minibatch: int | None, free: int | None, before: int, asked: int, traced: TracedModel | None
) -> str:
    """What to say of a model that does not fit. `before`: what was resident when `free` was free."""
    at = f" at minibatch {minibatch}" if minibatch else ""
    text = f"{ref!r}{at} does not fit in memory while it is profiled"
    if free is not None:
        text += f": of {show_size(free)} that were free, {show_size(max(0, resident_bytes() - before))} are in use"
        text += f" and {show_size(asked)} more were asked for" if asked else ""
    if traced is not None and minibatch:
        text += f"; {needed(traced, minibatch)}"
    return f"{text}; try a smaller --batch"


def needed(traced: TracedModel, minibatch: int) -> str:
    """What a training step needs at the least, by the sizes of what the layers hold and make."""
    weights = sum(one.nbytes for one in traced.model.parameters())
    trained = sum(one.nbytes for one in traced.model.parameters() if one.requires_grad)
    made = sum(spec.bytes(minibatch) for spec in traced.tensors)
    return (
        f"it needs about {show_size(weights + trained + made)}: {show_size(weights)} of weights, "
        f"{show_size(trained)} of gradients, {show_size(made)} for what the layers make, and more while they run"
    )


def refuse_the_hopeless(ref: str, traced: TracedModel, minibatch: int, free: int | None) -> None:
    """Raise an `InputError` where half of what gets gradients is more than all that is free: a backward pass needs most
    of it, and there is no use in filling the memory first."""
    kept = sum(spec.bytes(minibatch) for spec in traced.tensors if spec.requires_grad) // 2
    if free is not None and kept > free:
        raise InputError(
            f"{ref!r} at minibatch {minibatch} does not fit in memory: {needed(traced, minibatch)}, and "
            f"{show_size(free)} are free; try a smaller --batch"
        )


MARK = "pipeplan call"


@dataclass(frozen=True)
class Use:
    """Memory of one call, in bytes beyond what was held before it."""

    most: int
    left: int
    """After it."""


def recorded(device: torch.device, run: Callable[[Measure], None]) -> list[Use]:
    """The uses of the calls that `run` measures with what it is given, in turn; empty where nothing could be noted."""
    if device.type == "cuda":
        uses: list[Use] = []
        run(_on_cuda(uses))
        return uses
    # The profiler's library says on standard error that it starts and stops; nothing is above this level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(use_cpu=True, profile_memory=True) as profiled:
        run(_marked)
    return _noted(profiled)


def _on_cuda(uses: list[Use]) -> Measure:
    def measure(call: Callable[[], None]) -> Callable[[], float]:
        # The allocator counts when memory is asked for: there is no need to wait for the device.
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        uses.append(Use(torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before))
        return lambda: 0.0

    return measure


def _marked(call: Callable[[], None]) -> Callable[[], float]:
    with record_function(MARK):
        call()
    return lambda: 0.0


def _noted(profiled: profile) -> list[Use]:
    """What the profiler saw inside each marked call, in their order."""
    results = getattr(profiled, "kineto_results", None)
    events = list(results.events()) if results is not None else []
    calls = sorted((one.start_ns(), one.start_ns() + one.duration_ns()) for one in events if one.name() == MARK)
    changes = [(one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    uses, at = [], 0
    for start, end in calls:
        inside = []
        while at < len(changes) and changes[at][0] <= end:
            if changes[at][0] >= start:
                inside.append(changes[at][1])
            at += 1
        uses.append(use_of(inside))
    return uses


def use_of(changes: Iterable[int]) -> Use:
    """Of bytes handed out (positive) and taken back (negative), in order."""
    levels = list(accumulate(changes, initial=0))
    return Use(max(levels), levels[-1])


def measure_workspaces(run: LayerRun, device: torch.device) -> dict[str, int]:
    """Bytes by layer, of those that run: the most of forward and backward; one pass. Empty where nothing was noted."""
    names: list[str] = []

    def both(measure: Measure) -> None:
        names.extend(run.forward(measure))
        run.backward(measure)

    uses = recorded(device, both)
    if len(uses) != 2 * len(names):
        return {}
    layers = {layer.name: layer for layer in run.layers}
    found = {}
    for name, forward, backward in zip(names, uses, reversed(uses), strict=False):
        layer = layers[name]
        gradients = sum(spec.bytes(run.minibatch) for spec in layer.receives if spec.requires_grad)
        gradients += sum(one.nbytes for one in layer.trained)
        found[name] = max(0, forward.most - forward.left, backward.most - gradients)
    return found


class SavedBytes:
    """Bytes that autograd saves, by layer.

    Every storage counts once, for the layer that saves it first: within a stage that is exact. Where a cut runs
    between two layers that save the same tensor, the later stage holds it as what it received. Parameters, buffers
    and the model's inputs do not count: they are there anyway.
    """

    def __init__(self, not_counted: Iterable[Tensor]) -> None:
        self.by_layer: dict[str, int] = defaultdict(int)
        self._seen = {tensor.untyped_storage()._cdata for tensor in not_counted}
        # Alive until the end of the pass: a freed storage's address could be given to a new one.
        self._alive: list[Tensor] = []

    @contextmanager
    def watch(self, layer: str) -> Iterator[None]:
        """Charge what is saved in this context to the layer."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self._alive.append(tensor.detach())
                self.by_layer[layer] += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
