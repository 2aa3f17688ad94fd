"""`python -m pipeplan_launch.torchrun …`: torchrun, without its tracebacks where a worker has said what is wrong.

torchrun ends with a page of its own about any worker that fails, and with status 1. Here a worker's own status comes
out: 2 after its one-line error, 130 after an interrupt. A worker that was killed is named.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SAID = 2  # the status of a worker that has told what is wrong, or that another one has
STOPPED = 130  # of a worker that was asked to end


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments; returns the exit status."""
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # read by torchrun's loggers when they are made
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        torchrun(list(sys.argv[1:] if arguments is None else arguments))
    except ChildFailedError as error:
        return _report(error)
    except SignalException as stop:
        if stop.sigval != signal.SIGINT:  # torchrun passes the signal on, and workers speak up at SIGINT only
            print("stopped: --resume goes on from the last checkpoint", file=sys.stderr, flush=True)
        return STOPPED
    return 0


def _report(error: ChildFailedError) -> int:
    """Name the worker that first ended without a word of its own; torchrun ends the others because of it."""
    statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
    mute = [rank for rank, status in statuses.items() if status not in (SAID, STOPPED)]
    real = [rank for rank in mute if statuses[rank] != -signal.SIGTERM]
    if not real and len(mute) == len(statuses):
        real = mute  # nobody else ended: someone did send this signal
    if real:
        first = min(real, key=lambda rank: (error.failures[rank].timestamp, rank))
        print(f"error: worker {first} {_end(statuses[first])}", file=sys.stderr, flush=True)
    return SAID if SAID in statuses.values() else 1


def _end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}{' (out of memory is the usual reason for SIGKILL)' if name == 'SIGKILL' else ''}"


if __name__ == "__main__":
    sys.exit(main())
