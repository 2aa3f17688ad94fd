"""Ends an emulation whose planner is gone, even by SIGKILL: it holds the other end of a pipe. Torch-free."""

from __future__ import annotations

import fcntl
import os
import select
import signal


def end_with_asker() -> None:
    """End this process, and so all of its process namespace, when standard input ends, which nobody writes to.

    Takes standard input away from all processes that are started from here.
    """
    reader = os.dup(0)  # not inherited over exec
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # A handler, because the first process of a namespace is spared the signals that it has none for.
    signal.signal(signal.SIGIO, lambda *_: os._exit(1))
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([reader], [], [], 0)[0]:  # it had ended before
        os._exit(1)
