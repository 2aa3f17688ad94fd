"""Run-queue wait: how long a thread was runnable without a core, because other threads had it."""

from __future__ import annotations

import os
from contextlib import suppress

_PATH = "/proc/thread-self/schedstat"


class CoreWait:
    """Run-queue wait of the thread that creates it. Always 0 where the kernel keeps no such account (it is Linux's)."""

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)

    def total_s(self) -> float:
        """Run-queue wait since the thread started, in seconds."""
        if self._file < 0:
            return 0.0
        try:  # the fields are time on a core (ns), run-queue wait (ns) and number of time slices
            return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        except (OSError, IndexError, ValueError):
            return 0.0

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
