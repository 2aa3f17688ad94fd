"""The folder of a run: metrics, checkpoints, summary, and the error that ended it if one did. Torch-free."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors

ERROR = "error.txt"


def new_run(plan_folder: Path, chosen: Path | None) -> Path:
    """Make the folder for a new run: `chosen`, else `runs/<UTC time>` in the plan folder."""
    if chosen is not None:
        if (chosen / "checkpoints").exists() or (chosen / "metrics").exists():
            raise LaunchError(
                f"{chosen} already holds a run: add --resume to go on with it, or choose another --run-dir"
            )
        return _make(chosen)
    runs = plan_folder / "runs"
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = runs / f"{stamp}{suffix}"
        if not folder.exists():
            return _make(folder)
    raise LaunchError(f"{runs} has a hundred runs of this very second")


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


def reopen(run: Path) -> None:
    """Make a run folder ready to go on with: what ended it before is no longer true."""
    _make(run)


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
