"""Which of the processors that this process may use are threads of one core, from Linux's /sys."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM = Path("/sys/devices/system/cpu")


def physical_cores(processors: set[int] | None = None, system: Path = SYSTEM) -> int:
    """The cores behind these processors, by default those of this process; one for each where nothing is known."""
    mine = os.sched_getaffinity(0) if processors is None else processors
    cores = set()
    for number in mine:
        try:
            siblings = (system / f"cpu{number}" / "topology" / "thread_siblings_list").read_text(encoding="ascii")
        except (OSError, ValueError):
            siblings = str(number)
        cores.add(siblings.strip())
    return len(cores)
