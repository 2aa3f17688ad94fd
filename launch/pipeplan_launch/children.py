"""The processes that the launcher started, as Linux knows them. Elsewhere there are none to be found."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL

PROC = Path("/proc")
EVERY_S = 1.0


def pids() -> list[int]:
    """Of this process's children that have not ended."""
    return sorted(pid for pid, state in _states().items() if state not in "ZX")


def send(to: Sequence[int], number: int) -> None:
    """A signal to each."""
    for pid in to:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Stopped:
    """Ends children that someone has stopped (SIGSTOP) for too long.

    Their peers notice by themselves only if they wait for something of theirs.
    """

    def __init__(self, patience_s: float | None) -> None:
        self._patience_s = patience_s
        self._since: dict[int, float] = {}
        self._looked = 0.0

    def end_those_stopped_too_long(self) -> None:
        """To be called often: looks once in `EVERY_S`."""
        now = time.monotonic()
        if self._patience_s is None or now - self._looked < EVERY_S:
            return
        self._looked = now
        stopped = [pid for pid, state in _states().items() if state == "T"]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        send([pid for pid, since in self._since.items() if now - since > self._patience_s], SIGKILL)


def _states() -> dict[int, str]:
    """Process id -> state, a letter as in ps, of this process's children."""
    found = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            # pid (name) state parent …; the name may hold anything.
            state, parent, *_ = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(parent) == os.getpid():
                found[int(folder.name)] = state
    return found
