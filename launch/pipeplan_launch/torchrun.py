"""`python -m pipeplan_launch.torchrun …`: torchrun, without its tracebacks where a worker has said what is wrong.

torchrun ends with a page of its own about any worker that fails, and with status 1. Here a worker's own status comes
out: 2 after its one-line error, 130 after an interrupt. A worker that was killed is named.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

SAID = (2, 130)  # a worker that ends with one of these has told why


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
    except (SignalException, KeyboardInterrupt):
        return 130
    return 0


def _report(error: object) -> int:
    failures = getattr(error, "failures", {})
    said = [failure.exitcode for failure in failures.values() if failure.exitcode in SAID]
    if said:
        return int(said[0])
    for rank, failure in sorted(failures.items()):
        print(f"error: worker {rank} ended with status {failure.exitcode}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
