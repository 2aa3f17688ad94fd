"""The folder of a run: metrics, checkpoints, summary, and the error that ended it if there was one. Torch-free."""

from __future__ import annotations

import fcntl
import json
import os
import time
from datetime import UTC, datetime
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.typed_document import Amount, Finite, Natural, Positive, Text

# The types of two files of a run folder: `summary.json` and timelines.
#
# docs/file-formats.md describes the fields. Fields with a default may be missing in files of older versions.

SUMMARY_FORMAT: Literal["pipeplan-summary"] = "pipeplan-summary"
TIMELINE_FORMAT: Literal["pipeplan-timeline"] = "pipeplan-timeline"
SUMMARY_VERSION: Literal[1] = 1
TIMELINE_VERSION: Literal[1] = 1
FORWARD: Literal["forward"] = "forward"
BACKWARD: Literal["backward"] = "backward"
WEIGHTS: Literal["weights"] = "weights"
UPDATE: Literal["update"] = "update"
WAIT: Literal["wait"] = "wait"
ALL_REDUCE: Literal["all-reduce"] = "all-reduce"
Kind = Literal["forward", "backward", "weights", "update", "wait", "all-reduce"]
KINDS: tuple[str, ...] = get_args(Kind)


class TimelineInterval(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One activity of a worker. All-reduces run in the background; all other activities follow one another."""

    kind: Kind
    """A wait is for tensors of another stage or, before an update, for an all-reduce. A backward pass may have several
    parts: a second forward pass, the pass itself, and further work on its gradients. `weights` is a separate pass for
    the gradients of the weights."""
    number: Natural
    """The minibatch, from 0 in the epoch. For an update, an all-reduce and the wait for it: the group of
    minibatches."""
    start_s: Amount
    """Seconds since the beginning of the recorded epoch, which is the same moment for all workers."""
    end_s: Amount

    def __post_init__(self) -> None:
        if self.end_s < self.start_s:
            raise ValueError(f"the end, {self.end_s:g} s, is before the start, {self.start_s:g} s")

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


class TimelineFile(Struct, kw_only=True, frozen=True):
    """The recorded activities of one worker in the first minibatches of an epoch."""

    format: Literal["pipeplan-timeline"]
    version: Literal[1]
    plan: Text
    """Digest of the plan that ran."""
    rank: Natural
    stage: Natural
    replica: Natural
    epoch: Natural
    """Number of the epoch, from 0."""
    epoch_minibatches: Natural
    """Number of minibatches in the epoch."""
    first: Natural
    """The first recorded minibatch: 0 unless the run resumed in the middle of the epoch."""
    minibatches: Annotated[int, Meta(ge=0, le=100_000)]
    """Number of recorded minibatches of the pipeline. A run records far fewer than the limit, whose replay takes a
    minute."""
    intervals: tuple[TimelineInterval, ...]
    """Activities in the order of their starts."""

    def __post_init__(self) -> None:
        if self.first + self.minibatches > self.epoch_minibatches:
            raise ValueError(
                f"{self.minibatches} minibatches from {self.first} on are more than an epoch of "
                f"{self.epoch_minibatches} has"
            )


class FigurePair(Struct, frozen=True):
    """A predicted and a measured value, in the same unit; null if not known."""

    predicted: Amount | None = None
    measured: Amount | None = None
    ratio: Amount | None = None
    """Measured over predicted."""


class MeasuredTimes(Struct, frozen=True):
    """Times of a stage that are only measured, in seconds per minibatch of one replica."""

    wait_s: Amount | None = None
    load_s: Amount | None = None
    send_s: Amount | None = None
    other_s: Amount | None = None
    cpu_s: Amount | None = None
    core_wait_s: Amount | None = None
    others_wait_s: Amount | None = None


class StageSummary(Struct, kw_only=True, frozen=True):
    """One stage of a summary."""

    stage: Natural
    workers: tuple[Natural, ...]
    versions: Natural = 0
    cores: Amount | None = None
    boundary_s: Amount | None = None
    executor_s: Amount | None = None
    forward_s: FigurePair = FigurePair()
    backward_s: FigurePair = FigurePair()
    update_s: FigurePair = FigurePair()
    sync_s: FigurePair = FigurePair()
    wait_s: FigurePair = FigurePair()
    memory_bytes: FigurePair = FigurePair()
    measured: MeasuredTimes


class CauseFields(Struct, frozen=True):
    """The field `cause`."""

    text: str
    kind: str = ""
    stage: Natural | None = None
    explains: Finite | None = None


class SummaryFile(Struct, kw_only=True, frozen=True):
    """A summary.json."""

    format: Literal["pipeplan-summary"]
    version: Literal[1]
    plan: Text
    """Digest of the plan that ran."""
    minibatch: Positive | None = None
    emulated: bool = False
    """Whether stages slept instead of computing."""
    minibatch_s: FigurePair
    includes_fill: bool
    steady_minibatches: Natural
    stages: tuple[StageSummary, ...]
    cause: CauseFields | None = None
    difference_s: dict[str, Finite] = {}
    epochs: tuple[dict[str, Any], ...] = ()


ERROR_FILE = "error.txt"
LOCK_FILE = "in-use"


def new_run(plan_folder: Path, chosen: Path | None) -> Path:
    """Make the folder for a new run: `chosen`, or by default `runs/<UTC time>` in the plan folder."""
    if chosen is not None:
        check_folder_is_free(chosen)
        return _make(chosen)
    runs = plan_folder / "runs"
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = runs / f"{stamp}{suffix}"
        if not folder.exists():
            return _make(folder)
    raise LaunchError(f"{runs} already has a hundred runs of this second")


def check_folder_is_free(chosen: Path) -> None:
    """Raises `LaunchError` if the folder chosen for a new run holds another run."""
    if has_checkpoint(chosen):
        raise LaunchError(f"{chosen} already holds a run: add --resume to go on with it, or choose another --run-dir")
    if any(path.stat().st_size for path in (chosen / "metrics").glob("rank-*.jsonl")):
        raise LaunchError(f"{chosen} holds a run that ended before its first checkpoint: choose another --run-dir")


def run_to_resume(plan_folder: Path, chosen: Path | None) -> Path:
    """The folder of the run to resume: `chosen`, or by default the latest run of the plan that has a checkpoint."""
    if chosen is not None:
        if not has_checkpoint(chosen):
            raise LaunchError(f"{chosen} has no complete checkpoint to resume from: start anew without --resume")
        return chosen
    runs = plan_folder / "runs"
    candidates = sorted(run for run in runs.iterdir() if has_checkpoint(run)) if runs.is_dir() else []
    if not candidates:
        raise LaunchError(f"{runs} has no run with a complete checkpoint: start anew without --resume")
    return candidates[-1]


def recorded_name(plan: LaunchPlan, rank: int, stage: int) -> str:
    """Name, without an ending, of the files in which a worker records one of its stages."""
    return f"rank-{rank}" if plan.schedule.virtual is None else f"rank-{rank}-stage-{stage}"


_locks: list[IO[bytes]] = []


def lock_run(run: Path, patience_s: float = 10.0) -> None:
    """Lock a run folder for this launch, until this process ends. Raises `LaunchError` if another launch holds the
    lock.

    `patience_s`: seconds to wait for processes of the previous attempt to exit.
    """
    until = time.monotonic() + patience_s
    with explain_errors(run / LOCK_FILE, "opening"):
        file = (run / LOCK_FILE).open("ab")  # appending leaves the file's modification time as it is
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
    _locks.append(file)


def reopen_run(run: Path, epoch: int, minibatch: int) -> None:
    """Prepare a run folder for resuming at this minibatch of this epoch, both counted from 0.

    Removes the error that ended the run, and the metrics of minibatches that will run again. Raises `LaunchError`.
    """
    _make(run)
    for path in sorted((run / "metrics").glob("rank-*.jsonl*")):  # also older parts, which end in `OLDER`
        with explain_errors(path, "shortening"):
            truncate_metrics(path, (epoch, minibatch))


def truncate_metrics(path: Path, end: tuple[int, int]) -> None:
    """Truncate a file of metrics after its last line for a minibatch before (epoch, minibatch).

    The lines of one worker are in order. A line that was only half written when the worker ended is cut off too.
    """
    with path.open("r+b") as file:
        kept = 0
        if file.seek(0, os.SEEK_END):
            with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                kept = content.rfind(b"\n") + 1
                while kept:
                    start = content.rfind(b"\n", 0, kept - 1) + 1
                    if _is_before(content[start:kept], end):
                        break
                    kept = start
        file.truncate(kept)


def _is_before(line: bytes, end: tuple[int, int]) -> bool:
    """Whether a line of metrics belongs to a minibatch before (epoch, minibatch)."""
    try:
        content = json.loads(line)
        return (content["epoch"], content["minibatch"]) < end
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def claim_error(run: Path, message: str) -> bool:
    """Claim the right to print this run's error. Returns whether this worker is the first; only the first prints it."""
    try:
        with os.fdopen(os.open(run / ERROR_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "w") as file:
            file.write(message + "\n")
    except FileExistsError:
        return False
    except OSError:
        pass  # the disk may be the problem, so the error is printed in any case
    return True


def save_traceback(run: Path, rank: int, text: str) -> Path | None:
    """Write a traceback for developers into the run folder. Returns its path, or None if it cannot be written."""
    path = run / "errors" / f"rank-{rank}.txt"
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError:
        return None
    return path


def has_failed(run: Path) -> bool:
    """Whether a worker has reported an error of this run."""
    return (run / ERROR_FILE).exists()


def has_checkpoint(run: Path) -> bool:
    """Whether a run has a complete checkpoint."""
    return any((run / "checkpoints").glob("epoch-*/manifest.json"))


def _make(folder: Path) -> Path:
    with explain_errors(folder, "making"):
        (folder / "metrics").mkdir(parents=True, exist_ok=True)
        (folder / ERROR_FILE).unlink(missing_ok=True)
    return folder
