"""Entry point of one of several processes that measure at the same time.

`pipeplan.profiler.concurrent` starts it as `python -P -m pipeplan.profiler.concurrent_process FD PARENT`. The process
receives the model reference and the options over the socket FD, and sends back the profile. PARENT is the process id
of its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from pipeplan.errors import InputError
from pipeplan.profiler.concurrent import GroupMember
from pipeplan.profiler.profiler import profile_in_process

PR_SET_PDEATHSIG = 1  # from sys/prctl.h


def main(connection: Connection, parent: int) -> None:
    """Receive a model reference and options, and answer with (`progress`, `error` or `profile`, its content)."""
    _end_with_parent(parent)
    ref, options = connection.recv()

    def progress(done: int, total: int, what: str) -> None:
        connection.send(("progress", (done, total, what)))

    try:
        profile = profile_in_process(ref, options, progress, GroupMember(connection, options.processes))
    except InputError as error:
        connection.send(("error", str(error)))
    else:
        connection.send(("profile", profile))


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends, where it can (Linux)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the parent has gone
