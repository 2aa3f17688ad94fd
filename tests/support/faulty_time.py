"""A clock of Python that steps when a file says so, for processes that are started with `environment()`.

`time.time()` of such a process is the machine's time plus the seconds that `step` has written into the file. Only this
clock steps: what waits must go by `time.monotonic()`.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

VARIABLE = "PIPEPLAN_TEST_CLOCK"
_SITE = f"""
import mmap, os, struct, time

with open(os.environ["{VARIABLE}"], "rb") as _file:
    _step = mmap.mmap(_file.fileno(), 8, prot=mmap.PROT_READ)
_machine = time.time
time.time = lambda: _machine() + struct.unpack("d", _step)[0]
"""


def environment(folder: Path) -> dict[str, str]:
    """Variables for the processes; `folder` must be there, and keeps the clock."""
    (folder / "sitecustomize.py").write_text(_SITE)
    step(folder, 0.0)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: str(_file(folder))}


def step(folder: Path, seconds: float) -> None:
    """Set the clock so many seconds before or behind the machine's."""
    with open(_file(folder), "r+b" if _file(folder).exists() else "w+b", buffering=0) as file:
        file.write(struct.pack("d", seconds))


def _file(folder: Path) -> Path:
    return folder / "clock"
