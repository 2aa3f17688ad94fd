"""Memory and processor time of this process and its cores, from /proc; allocator settings. Torch-free."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ResidentMemory:
    """Resident memory of this process at one moment, in bytes."""

    now_bytes: int
    """Resident memory now; on systems without /proc, its peak."""
    peak_bytes: int
    """Peak since `reset_peak`; on systems without /proc, since the process started."""
    code_bytes: int
    """The part that holds pages of files, mostly code; 0 on systems that do not report it."""


def resident_memory() -> ResidentMemory:
    """Resident memory now, by one reading of /proc."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    told: dict[str, int] = {}
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            name, value = line.split(":", 1)
            if name in ("VmRSS", "VmHWM", "RssFile"):
                told[name] = int(value.split()[0]) * 1024
    except OSError:
        pass
    peak = told.get("VmHWM", peak)
    return ResidentMemory(told.get("VmRSS", peak), peak, told.get("RssFile", 0))


def resident_bytes() -> int:
    """Resident memory now, or its peak on systems without /proc. This call is faster than `resident_memory`."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return resident_memory().peak_bytes


def reset_peak() -> None:
    """Return freed memory to the system and restart the measurement of the peak, if the system allows it."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError):
        pass


# Memory that this process may still allocate, within the limits of the machine and of its control groups.


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still allocate on this machine and in its control groups; None if neither is
    known.
    """
    limits = [_meminfo(root), *_control_groups(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _meminfo(root: Path) -> int | None:
    for line in read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_groups(root: Path) -> Iterator[int | None]:
    """Free bytes of the control groups (version 1 and 2), from this process's own to the outermost that it sees."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit_file, usage_file = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit_file, usage_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.strip("/")
        while True:
            yield _group_free_bytes(folder, limit_file, usage_file)
            if folder == top:
                break
            folder = folder.parent


def _group_free_bytes(folder: Path, limit_file: str, usage_file: str) -> int | None:
    limit, used = read_text(folder / limit_file).strip(), read_text(folder / usage_file).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None  # "max", or no such file
    # The page cache counts as used, but the kernel drops it when memory is needed.
    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def read_text(path: Path) -> str:
    """The text of a file of /proc or /sys; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Processor time that all programs use on the cores of this worker, from Linux's /proc/stat.

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)
"""The fields of a core that count as busy: user, nice, system, interrupts, soft interrupts, and the time that other
virtual machines take."""


def own_cores() -> str:
    """The cores that this process may use, as text."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def busy_s() -> float:
    """Seconds for which these cores were busy since the system started, for any program; 0 if unknown."""
    try:
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines() if line.startswith("cpu")]
        ticks = sum(int(row[1 + field]) for row in rows if row[0] in mine for field in _BUSY)
    except (OSError, IndexError, ValueError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


# Settings of allocators: keep the memory of freed CPU tensors in the process, and let a GPU's memory grow in place.
#
# glibc returns freed blocks of more than 32 MiB to the system. Every large activation then causes page faults in every
# minibatch, which took a fifth of a ResNet-50's forward pass at 16 images. The profiler and the workers both keep freed
# memory, so that profiles predict runs. The resident memory of the same network was a tenth larger, because blocks of
# other sizes do not always fit into the kept memory.


# From malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

LARGEST_KEPT_BYTES = 1 << 30
"""Larger blocks are still returned to the system."""


GPU_VARIABLE, OLDER_GPU_VARIABLE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Settings of torch's allocator for GPUs, and their older name."""


def grow_gpu_memory(environment: MutableMapping[str, str]) -> None:
    """Let torch's GPU allocator grow its segments, unless the user has set its options. Reduces fragmentation."""
    if OLDER_GPU_VARIABLE not in environment:
        environment.setdefault(GPU_VARIABLE, "expandable_segments:True")


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next minibatch. Returns whether it does; only glibc can."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
