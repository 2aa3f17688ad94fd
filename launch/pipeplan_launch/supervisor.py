"""`python -m pipeplan_launch.supervisor …`: the launcher, which runs torchrun and restarts all workers after a fault.

After any failure of a worker, torchrun prints a page of text and ends with status 1. The launcher returns the worker's
own status instead: 2 after its one-line error, 130 after an interrupt. It names a worker that was killed.

Workers are restarted up to `--restarts` times (an option after `-m pipeplan_launch`). They are not restarted after an
error that they have reported, or after a request to stop. SIGINT, SIGTERM and SIGHUP are passed on to all workers,
which then stop training together. torchrun itself would wait for them for at most 30 seconds and treat their end as a
failure.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeplan_launch import child_processes
from pipeplan_launch.command_line import worker_parser
from pipeplan_launch.elastic import restart_state, servers
from pipeplan_launch.elastic.signals import LAUNCHER_VARIABLE, watch_signals
from pipeplan_launch.errors import LaunchError, print_status
from pipeplan_launch.telemetry.memory import grow_gpu_memory
from pipeplan_launch.torch_check import import_problem

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from pipeplan_launch.elastic.servers import ServerPlace, StoreAccess

STATUS_REPORTED = 2  # status of a worker that has reported an error, or that ends because another worker has
STATUS_SILENT = 1  # status of the launcher after a worker that died without reporting an error
STATUS_STOPPED = restart_state.STATUS_INTERRUPTED  # status of a worker that was asked to stop
EXPLAINED_STATUSES = (STATUS_REPORTED, STATUS_STOPPED, restart_state.STATUS_PEER_LOST)
STORE_TIMEOUT_S = 600.0
"""Seconds that torchrun waits for its store, if the workers' options do not set it."""
STOPPED_LINE = "stopped: --resume continues from the last checkpoint, if there is one"
STOPPED_EARLY_LINE = "stopped before any worker was started"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments; returns the exit status."""
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # torchrun's loggers read it when they are created
    # torch would print a page about a lost store. The workers report it in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Gives sets of strings the same order in all workers and after a restart. Models and data may depend on the order.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    try:
        with restart_state.attempts_folder() as folder:
            return _launch(list(sys.argv[1:] if arguments is None else arguments), folder)
    except LaunchError as error:
        print_status(f"error: {error}")
        return STATUS_REPORTED
    except KeyboardInterrupt:  # Ctrl-C before `watch_signals`
        print_status(STOPPED_EARLY_LINE)
        return STATUS_STOPPED


def _launch(arguments: list[str], folder: Path) -> int:
    if problem := import_problem():
        raise LaunchError(f"running a plan needs torch: {problem[0]}; {problem[1]}")
    options = _worker_options(arguments)
    place = servers.ServerPlace.of(servers.split_options(arguments)[0])
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from pipeplan_launch import worker_monitor
    from pipeplan_launch.worker_monitor import StoreReachability

    grow_gpu_memory(os.environ)
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    _ignore_torchrun_variables(os.environ)
    watch_signals(_forward_signal)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    access = servers.reach_store(place, _timeout_s(options), _end_silent_server)
    reachability = None
    if access.relay is not None:
        end_launch = partial(_end_without_store, place)
        reachability = StoreReachability(access.relay.store_answers, _timeout_s(options), end_launch)
    worker_monitor.monitor_workers(options.timeout if options else None, reachability, _report_restart)
    try:
        torchrun(_torchrun_arguments(arguments, options, folder, access))
    except ChildFailedError as error:
        return _status_after_failure(_report_failure(error))
    except worker_monitor.NoFurtherAttempt:
        return _status_after_failure(STATUS_STOPPED)
    except DistError as error:
        if missing := access.missing() if access.gateway is not None else "":
            print_status(f"error: {missing} did not come within {_timeout_s(options):g} s")
            return STATUS_REPORTED
        print_status(f"error: {_store_text(place)} cannot be reached: {_one_line(error)}")
        return STATUS_REPORTED
    except Exception as error:
        print_status(f"error: torchrun ended: {type(error).__name__}: {_one_line(error)}")
        return 1
    return _status_after_stop(0)


def _ignore_torchrun_variables(environment: MutableMapping[str, str]) -> None:
    """Remove torchrun's options from the environment. PET_STANDALONE would open a rendezvous on all addresses."""
    for name in [name for name in environment if name.startswith("PET_")]:
        del environment[name]


def _worker_options(arguments: Sequence[str]) -> Namespace | None:
    """The options of the workers; None if torchrun starts another program."""
    if "pipeplan_launch" not in arguments:
        return None
    return worker_parser(prog="launch.sh").parse_args(arguments[arguments.index("pipeplan_launch") + 1 :])


def _torchrun_arguments(
    arguments: Sequence[str], options: Namespace | None, folder: Path, access: StoreAccess
) -> list[str]:
    """torchrun's arguments, with the store of this launch in place of torchrun's own.

    Without a log folder torchrun would leave its own log folder behind.
    """
    from pipeplan_launch.elastic.store import rendezvous_options

    own = [f"--max-restarts={options.restarts if options else 0}", f"--log-dir={folder}"]
    own.append("--signals-to-handle=SIGQUIT")  # `_forward_signal` handles the others
    found = rendezvous_options(access.port, access.place.server, _timeout_s(options), access.listen_fd)
    return [*own, *found, *servers.split_options(arguments)[1]]


def _timeout_s(options: Namespace | None) -> float:
    return float(options.timeout) if options else STORE_TIMEOUT_S


def _end_silent_server(store_port: int, server: int, silent_s: float) -> None:
    """At server 0: end this attempt, because another server gives no sign of life. Called in a separate thread."""
    from pipeplan_launch.elastic.rendezvous import end_attempt

    with suppress(RuntimeError):
        end_attempt(store_port, f"server {server} gave no sign of life for {silent_s:.0f} s", server)


def _store_text(place: ServerPlace) -> str:
    where = f" at {place.address}, port {place.port}" if place.address else ""
    return f"server 0{where}, where the workers' common store is,"


def _end_without_store(place: ServerPlace) -> None:
    """End the launch. Called in a separate thread, as torchrun's thread waits for the store."""
    print_status(f"error: {_store_text(place)} cannot be reached any more")
    child_processes.signal_all(child_processes.child_pids(), signal.SIGKILL)
    restart_state.remove_attempts_folder()
    os._exit(STATUS_REPORTED)


_first_signal_s: list[float] = []


def _forward_signal(number: int) -> None:
    """Handle a signal. Called in a separate thread, as the main thread may be waiting for another server."""
    workers = child_processes.child_pids()
    again = bool(_first_signal_s) and time.monotonic() - _first_signal_s[0] > 1
    if workers and not again:
        if not _first_signal_s:
            _first_signal_s.append(time.monotonic())
            restart_state.record_stop_signal(number)
            # SIGTERM rather than SIGINT: a worker that is still starting would print a traceback for SIGINT.
            child_processes.signal_all(workers, signal.SIGTERM)
        return
    child_processes.signal_all(workers, signal.SIGKILL)
    print_status(STOPPED_LINE)
    restart_state.remove_attempts_folder()
    os._exit(STATUS_STOPPED)


def _status_after_failure(status: int) -> int:
    if restart_state.stop_signal() is None:
        return restart_state.final_status() or status
    return _status_after_stop(restart_state.final_status() or STATUS_STOPPED)


def _status_after_stop(status: int) -> int:
    """Print where training stopped, if it stopped; returns the exit status."""
    line = restart_state.stop_line()
    if line is not None and status in (0, STATUS_STOPPED):
        print_status(line)
        return 0
    if status == STATUS_STOPPED:
        print_status(STOPPED_LINE)
    return status


def _report_failure(error: ChildFailedError) -> int:
    """Print the worker that first ended without a message, which made torchrun end the others.

    Returns the exit status: `STATUS_SILENT` if there is such a worker.
    """
    if (cause := _silent_end(error.failures)) is not None:
        print_status(f"error: {cause}")
        if restart_state.stop_signal() is None:
            restart_state.record_final_status(STATUS_SILENT)  # outranks the status of workers that lost this worker
        return STATUS_SILENT
    return STATUS_REPORTED if STATUS_REPORTED in (one.exitcode for one in error.failures.values()) else 1


def _report_restart(failures: Mapping[int, ProcessFailure], restart: int, most: int) -> None:
    """Print why all workers restart. If training had begun, the next attempt prints the reason, with its checkpoint."""
    if not restart_state.has_begun(restart - 1):
        cause = _silent_end(failures) or restart_state.fault_of(restart - 1) or "a worker on another server was lost"
        print_status(f"{cause}; restart {restart} of {most}: no minibatch had been run")


def _silent_end(failures: Mapping[int, ProcessFailure]) -> str | None:
    """The worker that first ended without a message, and how it ended; None if every worker has reported a reason."""
    statuses = {rank: failure.exitcode for rank, failure in failures.items()}
    silent = [rank for rank, status in statuses.items() if status not in EXPLAINED_STATUSES]
    candidates = [rank for rank in silent if statuses[rank] != -signal.SIGTERM]
    if not candidates and len(silent) == len(statuses):
        candidates = silent  # no other worker ended, so torchrun did not send this SIGTERM
    if not candidates:
        return None
    first = min(candidates, key=lambda rank: (failures[rank].timestamp, rank))
    return f"worker {restart_state.worker_of(first)} {_end_text(statuses[first])}"


def _end_text(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}{' (out of memory is the usual reason for SIGKILL)' if name == 'SIGKILL' else ''}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    sys.exit(main())
