"""State that one attempt of a launch leaves for the next. torchrun restarts all workers after a fault. Torch-free.

The launcher (`pipeplan_launch.supervisor`) makes a small folder on its server and removes it when it ends. The variable
`PIPEPLAN_ATTEMPTS` holds its path. A worker that is started without the launcher has no such folder and remembers
nothing.

    workers     the plan's worker for each process, in the order of torchrun's ranks
    final-N     a final error was reported, or a stop was requested: all attempts end with status N
    begun       number of the restart after which training or inference last began
    fault       number of the restart after which a worker last noticed a fault, and a description of the fault
    stop        number of the signal by which the launcher was asked to stop
    stopped     the line that says where training stopped, after its checkpoint
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeplan_launch.errors import LaunchError, print_status

VARIABLE = "PIPEPLAN_ATTEMPTS"
STATUS_PEER_LOST = 3
"""Exit status of a worker that lost another worker, if all workers are to restart."""
STATUS_INTERRUPTED = 130
FINAL_STATUSES = (1, 2, STATUS_INTERRUPTED)
"""Exit statuses after which nothing is restarted, the most specific first."""


@contextmanager
def attempts_folder() -> Iterator[Path]:
    """Make the launcher's folder, for the duration of the launch; yields its path.

    Raises `LaunchError` if no temporary folder can be made.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="pipeplan-"))
    except OSError as error:
        raise LaunchError(f"no temporary folder can be made: {error.strerror or error}; set TMPDIR") from error
    os.environ[VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        remove_attempts_folder()


def remove_attempts_folder() -> None:
    """Remove the launcher's folder."""
    folder = os.environ.pop(VARIABLE, None)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def restart_number() -> int:
    """Number of restarts so far: 0 in the first attempt."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def most_restarts() -> int:
    """Number of restarts that are allowed; 0 without the launcher."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) if _folder() else 0


def may_restart() -> bool:
    """Whether a fault now is followed by another attempt."""
    return restart_number() < most_restarts() and final_status() is None and stop_signal() is None


def remember_workers(workers: Sequence[int]) -> None:
    """Remember the plan's worker for each process, by torchrun's rank, so that the launcher can name it."""
    if list(workers) == sorted(workers) and _read("workers") is None:
        return
    _write("workers", " ".join(map(str, workers)))


def worker_of(rank: int) -> int:
    """The plan's worker that torchrun's process of this rank ran in the last attempt."""
    workers = (_read("workers") or "").split()
    return int(workers[rank]) if rank < len(workers) else rank


def record_begun() -> None:
    """Note that this attempt has reached its first minibatch."""
    _write("begun", str(restart_number()))


def has_begun(restart: int) -> bool:
    """Whether the attempt after this number of restarts had reached its first minibatch."""
    return _read("begun") == str(restart)


def only_start_ups() -> bool:
    """Whether all attempts so far ended before their first minibatch. The launcher has then reported the reason."""
    return has_launcher() and restart_number() > 0 and _read("begun") is None


def record_fault(text: str) -> None:
    """Note the first fault that a worker of this attempt has noticed."""
    if fault_of(restart_number()) is None:
        _write("fault", f"{restart_number()} {text}")


def fault_of(restart: int) -> str | None:
    """The fault that ended the attempt after this number of restarts; None if no worker has noticed a fault."""
    number, _, text = (_read("fault") or "").partition(" ")
    return text if number == str(restart) else None


def record_final_status(status: int) -> None:
    """Rule out further attempts: a final error was reported, or a stop was requested."""
    assert status in FINAL_STATUSES
    _write(f"final-{status}", "")


def final_status() -> int | None:
    """The exit status if further attempts are ruled out; else None."""
    return next((status for status in FINAL_STATUSES if _read(f"final-{status}") is not None), None)


def record_stop_signal(number: int) -> None:
    """Note that the launcher received this signal."""
    _write("stop", str(number))


def stop_signal() -> int | None:
    """The signal that the launcher received; None if it received none."""
    text = _read("stop")
    return int(text) if text else None


def record_stop_line(line: str) -> None:
    """Note that training has stopped as requested, after a checkpoint. The launcher prints the line when it ends."""
    if not _write("stopped", line):
        print_status(line)


def stop_line() -> str | None:
    """The line of `record_stop_line`; None if training has not stopped."""
    return _read("stopped")


def has_launcher() -> bool:
    """Whether the launcher started this worker."""
    return _folder() is not None


def _folder() -> Path | None:
    text = os.environ.get(VARIABLE)
    return Path(text) if text else None


def _write(name: str, text: str) -> bool:
    """Write a file of the folder; returns whether that succeeded. It is moved into place, because other processes may
    read it at any time.
    """
    folder = _folder()
    if folder is None:
        return False
    part = folder / f".{name}.{os.getpid()}"
    with suppress(OSError):
        part.write_text(text, encoding="utf-8", errors="surrogateescape")
        os.replace(part, folder / name)
        return True
    return False


def _read(name: str) -> str | None:
    folder = _folder()
    if folder is None:
        return None
    try:
        return (folder / name).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
