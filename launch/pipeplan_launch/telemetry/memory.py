"""Memory of this process, from /proc where it exists. Torch-free."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory now, or its peak on systems without /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak of resident memory since `reset_peak`, or since the process started on systems without /proc."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def code_bytes() -> int:
    """Resident memory that is pages of files, mostly code; 0 on systems that do not tell."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssFile:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def reset_peak() -> None:
    """Return freed memory to the system and restart the measurement of the peak, where the system allows it."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError):
        pass
