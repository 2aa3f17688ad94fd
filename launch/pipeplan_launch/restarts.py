"""What the attempts of a launch must know of each other: torchrun starts all workers again after a fault. Torch-free.

The launcher (`pipeplan_launch.torchrun`) makes a small folder on its server, and removes it when it ends; its path is
in `PIPEPLAN_ATTEMPTS`. A worker that is started without the launcher has none: nothing is remembered then.

    run         the run folder, written by worker 0: the next attempt goes on with it
    workers     the worker of the plan that every process is, in the order of torchrun's ranks
    final-N     an error that starting again cannot cure was said, or a stop was asked for: end with status N
    stop        the launcher was asked to stop, by the signal whose number this holds
    stopped     the line that says where training stopped, after its checkpoint
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeplan_launch.errors import LaunchError

VARIABLE = "PIPEPLAN_ATTEMPTS"
LOST = 3
"""The status of a worker that lost another one, where all are to start again."""
INTERRUPTED = 130
FINAL = (1, 2, INTERRUPTED)
"""Statuses after which nothing is started again, the most telling first."""


@contextmanager
def remembering() -> Iterator[Path]:
    """In the launcher: the folder, for as long as the launch lasts. Raises `LaunchError` where there is no room."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="pipeplan-"))
    except OSError as error:
        raise LaunchError(f"no temporary folder can be made: {error.strerror or error}; set TMPDIR") from error
    os.environ[VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        forget()


def forget() -> None:
    """Remove the folder."""
    folder = os.environ.pop(VARIABLE, None)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def restart_number() -> int:
    """How often all workers have been started again: 0 in the first attempt."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def most_restarts() -> int:
    """How often they may be."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) if _folder() else 0


def may_restart() -> bool:
    """Whether a fault now is followed by another attempt."""
    return restart_number() < most_restarts() and given_up() is None and stop_asked() is None


def remember_run(run: Path) -> None:
    """Worker 0 has decided on the run folder."""
    _write("run", str(run.resolve()))


def run_of_last_attempt() -> Path | None:
    """The run folder to go on with after a restart; None in the first attempt, and where there was none yet."""
    text = _read("run") if restart_number() > 0 else None
    return Path(text) if text else None


def remember_workers(workers: Sequence[int]) -> None:
    """The worker of the plan that every process is, by torchrun's rank: the launcher names workers."""
    if list(workers) == sorted(workers) and _read("workers") is None:
        return
    _write("workers", " ".join(map(str, workers)))


def worker_of(rank: int) -> int:
    """The worker of the plan that torchrun's process of that rank was in the last attempt."""
    workers = (_read("workers") or "").split()
    return int(workers[rank]) if rank < len(workers) else rank


def give_up(status: int) -> None:
    """No further attempt: what is wrong has been said (or a stop was asked for), and stays wrong."""
    assert status in FINAL
    _write(f"final-{status}", "")


def given_up() -> int | None:
    """The status to end with if there is to be no further attempt."""
    return next((status for status in FINAL if _read(f"final-{status}") is not None), None)


def ask_to_stop(number: int) -> None:
    """The launcher got this signal."""
    _write("stop", str(number))


def stop_asked() -> int | None:
    """The signal that the launcher got."""
    text = _read("stop")
    return int(text) if text else None


def announce_stop(line: str) -> None:
    """Training has stopped as asked, and what it did is in a checkpoint. The launcher says so, once all have ended."""
    if not _write("stopped", line):
        print(line, file=sys.stderr, flush=True)


def stop_announced() -> str | None:
    """What `announce_stop` was given."""
    return _read("stopped")


def launched() -> bool:
    """Whether the launcher started this worker."""
    return _folder() is not None


def _folder() -> Path | None:
    text = os.environ.get(VARIABLE)
    return Path(text) if text else None


def _write(name: str, text: str) -> bool:
    """Whether it could be written. Moved into place, because others read it at any time."""
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
