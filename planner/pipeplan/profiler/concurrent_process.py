"""Entry point of one of several processes that measure at the same time.

`pipeplan.profiler.concurrent` starts it as `python -P -m pipeplan.profiler.concurrent_process FD PARENT`. The process
receives the model reference and the options over the socket FD, and sends back the profile. PARENT is the process id
of its parent.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from pipeplan.errors import InputError
from pipeplan.profiler.busy_cores import end_with_parent
from pipeplan.profiler.concurrent import GroupMember
from pipeplan.profiler.profiler import profile_in_process


def main(connection: Connection, parent: int) -> None:
    """Receive a model reference and options, and answer with (`progress`, `error` or `profile`, its content)."""
    end_with_parent(parent)
    ref, options = connection.recv()

    def progress(done: int, total: int, what: str) -> None:
        connection.send(("progress", (done, total, what)))

    try:
        profile = profile_in_process(ref, options, progress, GroupMember(connection, options.processes))
    except InputError as error:
        connection.send(("error", str(error)))
    else:
        connection.send(("profile", profile))


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the parent has gone
