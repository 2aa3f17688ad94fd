"""Ends an emulation whose planner is gone, even by SIGKILL: it holds the other end of a pipe. Torch-free."""

from __future__ import annotations

import os
import select


class Leash:
    """Standard input, which nobody writes to; it ends with the process that holds the other end."""

    def __init__(self) -> None:
        """Takes standard input away from all processes that are started from here."""
        self._reader = os.dup(0)  # not inherited over exec
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def check(self) -> None:
        """End this process, and so all of its process namespace, if that has happened."""
        if select.select([self._reader], [], [], 0)[0]:
            os._exit(1)
