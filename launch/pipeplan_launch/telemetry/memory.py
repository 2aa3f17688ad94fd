"""Memory of this process, from /proc where it exists. Torch-free."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ResidentMemory:
    """Resident memory of this process at one moment, in bytes."""

    now_bytes: int
    """All of it; its peak on systems without /proc."""
    peak_bytes: int
    """Its peak since `reset_peak`, or since the process started on systems without /proc."""
    code_bytes: int
    """The part that is pages of files, mostly code; 0 on systems that do not tell."""


def resident_memory() -> ResidentMemory:
    """Resident memory now, by one reading of /proc."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
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
    """Resident memory now, or its peak on systems without /proc. It takes less time than `resident_memory`."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return resident_memory().peak_bytes


def reset_peak() -> None:
    """Return freed memory to the system and restart the measurement of the peak, where the system allows it."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError):
        pass
