"""Processor time that all programs use on the cores of this worker, from Linux's /proc/stat."""

from __future__ import annotations

import os
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)
"""The fields of a core that count: user, nice, system, interrupts, soft interrupts, and what other virtual machines
take."""


def own_cores() -> str:
    """The cores that this process may use, as text; empty where the system does not say."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0)))) if hasattr(os, "sched_getaffinity") else ""


def busy_s() -> float:
    """Seconds for which these cores were busy since the system started, for whatever program; 0 where unknown."""
    try:
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines() if line.startswith("cpu")]
        ticks = sum(int(row[1 + field]) for row in rows if row[0] in mine for field in _BUSY)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")
