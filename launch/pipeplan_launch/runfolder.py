"""The folder of a run: metrics, checkpoints, summary, and the error that ended it if one did. Torch-free."""

from __future__ import annotations

import fcntl
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors

ERROR = "error.txt"
LOCK = "in-use"
_BLOCK = 2**20


def new_run(plan_folder: Path, chosen: Path | None) -> Path:
    """Make the folder for a new run: `chosen`, else `runs/<UTC time>` in the plan folder."""
    if chosen is not None:
        refuse_taken(chosen)
        return _make(chosen)
    runs = plan_folder / "runs"
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = runs / f"{stamp}{suffix}"
        if not folder.exists():
            return _make(folder)
    raise LaunchError(f"{runs} has a hundred runs of this very second")


def refuse_taken(chosen: Path) -> None:
    """Raises `LaunchError` where a new run's folder holds another run."""
    if _has_checkpoint(chosen):
        raise LaunchError(f"{chosen} already holds a run: add --resume to go on with it, or choose another --run-dir")
    if any(path.stat().st_size for path in (chosen / "metrics").glob("rank-*.jsonl")):
        raise LaunchError(f"{chosen} holds a run that ended before its first checkpoint: choose another --run-dir")


def run_to_resume(plan_folder: Path, chosen: Path | None) -> Path:
    """The folder to go on with: `chosen`, else the latest run of the plan that has a checkpoint."""
    if chosen is not None:
        if not _has_checkpoint(chosen):
            raise LaunchError(f"{chosen} has no complete checkpoint to resume from: start anew without --resume")
        return chosen
    runs = plan_folder / "runs"
    found = sorted(run for run in runs.iterdir() if _has_checkpoint(run)) if runs.is_dir() else []
    if not found:
        raise LaunchError(f"{runs} has no run with a complete checkpoint: start anew without --resume")
    return found[-1]


_held: list[IO[bytes]] = []


def hold(run: Path, patience_s: float = 10.0) -> None:
    """Keep a run folder for this launch until this process ends. Raises `LaunchError` if another launch has it.

    `patience_s`: for what is left of an attempt before this one to be gone.
    """
    until = time.monotonic() + patience_s
    with explain_errors(run / LOCK, "opening"):
        file = (run / LOCK).open("ab")  # a run that is left as it is keeps its times
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                file.close()
                raise LaunchError(f"{run} is in use by another launch: wait for it, or choose another run") from None
            time.sleep(0.1)
        except OSError:
            break  # a file system without locks
        else:
            break
    _held.append(file)


def reopen(run: Path, epoch: int, minibatch: int) -> None:
    """Make a run folder ready to go on with after so many minibatches of an epoch (both counted from 0).

    What ended it before is no longer true, and the metrics of minibatches that will be run again are removed. Raises
    `LaunchError`.
    """
    _make(run)
    for path in sorted((run / "metrics").glob("rank-*.jsonl")):
        with explain_errors(path, "shortening"):
            keep_until(path, (epoch, minibatch))


def keep_until(path: Path, end: tuple[int, int]) -> None:
    """Cut off the lines at the end of a file of metrics that are not of a minibatch before (epoch, minibatch).

    Lines of one worker are in order. One that was only half written when the worker ended is cut off, too.
    """
    with path.open("r+b") as file:
        size, block, found = file.seek(0, os.SEEK_END), _BLOCK, False
        while size and not found:
            start = max(0, size - block)
            file.seek(start)
            kept, found = _kept_bytes(file.read(size - start), whole=start == 0, end=end)
            size, block = start + kept, 2 * block
        file.truncate(size)


def _kept_bytes(block: bytes, *, whole: bool, end: tuple[int, int]) -> tuple[int, bool]:
    """(how much of the end of a file may be kept, whether that is known to be kept). `whole`: it begins the file."""
    kept = block.rfind(b"\n") + 1
    while kept:
        begin = block.rfind(b"\n", 0, kept - 1) + 1
        if begin == 0 and not whole:
            return kept, False  # this line begins before the block
        if _is_before(block[begin:kept], end):
            return kept, True
        kept = begin
    return 0, False


def _is_before(line: bytes, end: tuple[int, int]) -> bool:
    try:
        content = json.loads(line)
        return (content["epoch"], content["minibatch"]) < end
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def claim_error(run: Path, message: str) -> bool:
    """Whether this worker is the first to report an error of this run: only one of them prints it."""
    try:
        with os.fdopen(os.open(run / ERROR, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), "w") as file:
            file.write(message + "\n")
    except FileExistsError:
        return False
    except OSError:
        pass  # the disk may be what is wrong: say it rather than hide it
    return True


def save_traceback(run: Path, rank: int, text: str) -> Path | None:
    """Write what only a developer wants to see into the run folder; None if that cannot be."""
    path = run / "errors" / f"rank-{rank}.txt"
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError:
        return None
    return path


def has_failed(run: Path) -> bool:
    """Whether a worker has reported an error of this run."""
    return (run / ERROR).exists()


def _has_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob("epoch-*/manifest.json"))


def _make(folder: Path) -> Path:
    with explain_errors(folder, "making"):
        (folder / "metrics").mkdir(parents=True, exist_ok=True)
        (folder / ERROR).unlink(missing_ok=True)
    return folder
