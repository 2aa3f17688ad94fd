"""`python -m pipeplan_launch.torchrun …`: torchrun, which starts all workers again after a fault.

torchrun ends with a page of its own about any worker that fails, and with status 1. Here a worker's own status comes
out: 2 after its one-line error, 130 after an interrupt. A worker that was killed is named.

Workers start again up to `--restarts` times, of the options behind `-m pipeplan_launch`; not after an error that they
have said, nor once a stop was asked for. SIGINT and SIGTERM go to all workers, which then bring training to an end
together; torchrun itself would wait for them no longer than 30 seconds, and take what they do for a failure.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeplan_launch import children, restarts
from pipeplan_launch.arguments import parser
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.interrupt import watch_signals
from pipeplan_launch.torch_here import unusable

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from pipeplan_launch.oversight import Reach

SAID = 2  # the status of a worker that has told what is wrong, or that another one has
STOPPED = restarts.INTERRUPTED  # of a worker that was asked to end
QUIET = (SAID, STOPPED, restarts.LOST)
STOPPED_LINE = "stopped: --resume goes on from the last checkpoint, if there is one"
NOTHING_YET = "stopped before any worker was started"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments; returns the exit status."""
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # read by torchrun's loggers when they are made
    # Of a store that is gone torch would print a page, where the workers say it in a line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        with restarts.remembering() as folder:
            return _launch(list(sys.argv[1:] if arguments is None else arguments), folder)
    except LaunchError as error:
        _say(f"error: {error}")
        return SAID
    except KeyboardInterrupt:  # before signals are watched for
        _say(NOTHING_YET)
        return STOPPED


def _launch(arguments: list[str], folder: Path) -> int:
    if why := unusable():
        raise LaunchError(f"running a plan needs torch: {why[0]}; {why[1]}")
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from pipeplan_launch import oversight

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    given = _workers_options(arguments)
    oversight.begin(given.timeout if given else None, _reach(arguments, given))
    watch_signals(_pass_on)
    try:
        torchrun([*_own_options(given, folder), *arguments])
    except ChildFailedError as error:
        return _end_of_failure(_report(error))
    except oversight.NoMore:
        return _end_of_failure(STOPPED)
    except SignalException:  # torchrun before 2.9 handles all signals, whatever one says
        return _end_of_stop(STOPPED)
    except DistError as error:
        _say(f"error: server 0, where the workers' common store is, cannot be reached: {_one_line(error)}")
        return SAID
    except Exception as error:
        _say(f"error: torchrun ended: {type(error).__name__}: {_one_line(error)}")
        return 1
    return _end_of_stop(0)


def _workers_options(arguments: Sequence[str]) -> Namespace | None:
    """What the workers are given, if they are ours."""
    if "pipeplan_launch" not in arguments:
        return None
    return parser(prog="launch.sh").parse_args(arguments[arguments.index("pipeplan_launch") + 1 :])


def _reach(arguments: Sequence[str], given: Namespace | None) -> Reach | None:
    """Where this is not the only server, and not the one that has the store."""
    from pipeplan_launch.oversight import Reach

    named = dict(itertools.pairwise(arguments))
    address, port = named.get("--master-addr"), named.get("--master-port", "")
    if given is None or address is None or not port.isdecimal() or named.get("--node-rank") in (None, "0"):
        return None
    return Reach((address, int(port)), given.timeout, _cut_off)


def _cut_off() -> None:
    """In a thread of its own, as torchrun waits for an answer."""
    _say("error: server 0, where the workers' common store is, cannot be reached any more")
    children.send(children.pids(), signal.SIGKILL)
    restarts.forget()
    os._exit(SAID)


def _own_options(given: Namespace | None, folder: Path) -> list[str]:
    """Options of torchrun, which would leave its own folder behind."""
    from torch.distributed.launcher.api import LaunchConfig

    options = [f"--max-restarts={given.restarts if given else 0}", f"--log-dir={folder}"]
    if hasattr(LaunchConfig, "signals_to_handle"):
        options.append("--signals-to-handle=SIGHUP,SIGQUIT")  # the others are ours
    return options


_first_signal: list[float] = []


def _pass_on(number: int) -> None:
    """In a thread of its own, as the main one may be waiting for another server."""
    workers = children.pids()
    again = bool(_first_signal) and time.monotonic() - _first_signal[0] > 1
    if workers and not again:
        if not _first_signal:
            _first_signal.append(time.monotonic())
            restarts.ask_to_stop(number)
            # Of the two, the one of which a worker that is still starting dies without a traceback.
            children.send(workers, signal.SIGTERM)
        return
    children.send(workers, signal.SIGKILL)
    _say(STOPPED_LINE)
    restarts.forget()
    os._exit(STOPPED)


def _end_of_failure(status: int) -> int:
    if restarts.stop_asked() is None:
        return restarts.given_up() or status
    return _end_of_stop(restarts.given_up() or STOPPED)


def _end_of_stop(status: int) -> int:
    """Say where training stopped, if it did."""
    line = restarts.stop_announced()
    if line is not None and status in (0, STOPPED):
        _say(line)
        return 0
    if status == STOPPED:
        _say(STOPPED_LINE)
    return status


def _report(error: ChildFailedError) -> int:
    """Name the worker that first ended without a word of its own; torchrun ends the others because of it."""
    statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
    mute = [rank for rank, status in statuses.items() if status not in QUIET]
    real = [rank for rank in mute if statuses[rank] != -signal.SIGTERM]
    if not real and len(mute) == len(statuses):
        real = mute  # nobody else ended: someone did send this signal
    if real:
        first = min(real, key=lambda rank: (error.failures[rank].timestamp, rank))
        _say(f"error: worker {restarts.worker_of(first)} {_end(statuses[first])}")
    return SAID if SAID in statuses.values() else 1


def _end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}{' (out of memory is the usual reason for SIGKILL)' if name == 'SIGKILL' else ''}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
