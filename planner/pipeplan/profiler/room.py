"""Memory that there is, on the CPU: what asks for more fails with a sentence, before the system ends the process.

Linux promises more memory than there is, and ends a process that uses it. Under a limit of what is free, asking fails
instead, and torch says how much was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.units import show_size
from pipeplan_launch.memory import resident_bytes
from pipeplan_launch.trace import TracedModel

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
