"""Ends an emulation when the planner that started it is gone, even by SIGKILL. Torch-free.

The planner holds the other end of a pipe, which the kernel closes with it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


def end_with_parent() -> None:
    """End this process, and with it its process namespace, once standard input is closed. Nothing is written to it.

    Processes that are started afterwards have no standard input.
    """
    reader = os.dup(0)  # programs that are started later do not inherit this descriptor
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # The first process of a namespace ignores signals without a handler.
    signal.signal(signal.SIGIO, lambda *_: os._exit(1))
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([reader], [], [], 0)[0]:  # standard input was closed before
        os._exit(1)
