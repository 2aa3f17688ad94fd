"""How long a thread waited for a core while it could have run: what other programs on its processor took of it."""

from __future__ import annotations

import os
from contextlib import suppress

_PATH = "/proc/thread-self/schedstat"


class CoreWait:
    """Of the thread that makes it. Linux only, and not where the kernel keeps no such account: then it says 0."""

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)

    def total_s(self) -> float:
        """Since the thread began."""
        if self._file < 0:
            return 0.0
        try:  # time on a core, time of waiting for one, both in ns, and how often it got one
            return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        except (OSError, IndexError, ValueError):
            return 0.0

    def close(self) -> None:
        """Give the file back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
