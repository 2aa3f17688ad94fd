"""Finds the launcher's child processes in Linux's /proc. On other systems it finds none."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL

PROC = Path("/proc")
EVERY_S = 1.0
ENDED = "ZX"
"""States of processes that have ended."""


def child_pids() -> list[int]:
    """Process ids of this process's children that have not ended."""
    return sorted(pid for pid, state in states_of_children([os.getpid()]).items() if state not in ENDED)


def signal_all(pids: Sequence[int], number: int) -> None:
    """Send a signal to each of these processes that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class StoppedChildren:
    """Kills children that have been stopped (SIGSTOP) for too long.

    The peers of a stopped worker notice the stop only when they wait for its message.
    """

    def __init__(self, patience_s: float | None) -> None:
        self._patience_s = patience_s
        self._since: dict[int, float] = {}
        self._looked = 0.0

    def end_those_stopped_too_long(self) -> None:
        """Check for stopped children. Call this often; it checks at most once in `EVERY_S` seconds."""
        now = time.monotonic()
        if self._patience_s is None or now - self._looked < EVERY_S:
            return
        self._looked = now
        stopped = [pid for pid, state in states_of_children([os.getpid()]).items() if state == "T"]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        signal_all([pid for pid, since in self._since.items() if now - since > self._patience_s], SIGKILL)


def states_of_children(parents: Collection[int]) -> dict[int, str]:
    """State of each child of these processes, by the child's process id: a letter as in ps."""
    states = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            # The format is `pid (name) state parent …`, where the name may contain any character.
            state, parent, *_ = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(parent) in parents:
                states[int(folder.name)] = state
    return states
