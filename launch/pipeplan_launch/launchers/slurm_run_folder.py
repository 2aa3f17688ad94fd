"""The choice of a SLURM job's run folder. A restarted job finds it by the number of the job in its name."""

from __future__ import annotations

import glob
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

_CHECKPOINTS = "checkpoints/epoch-*/manifest.json"
_STARTING_POINTS = ("--resume-from", "--weights", "--run-dir")
"""Options of launch.sh that are dropped when a job continues from its own checkpoint. Each has a value."""


@dataclass(frozen=True)
class JobRun:
    """The run folder of one start of a job."""

    folder: str
    """Empty if launch.sh chooses it."""
    arguments: list[str]
    """Arguments of launch.sh."""


def choose_run(plan_folder: str, job: str, restart: int, arguments: Sequence[str]) -> JobRun:
    """Choose the run folder of a job that has started again `restart` times.

    The first start makes a folder, unless the user named one, or `--resume` means the latest run of the plan. A later
    start continues from the last checkpoint of an earlier one. If there is none, it begins again in a new folder.
    """
    named, resumes = _run_options(arguments)
    if resumes and not named:
        return _latest_run(plan_folder, arguments)
    base = named or _folder_of_job(plan_folder, job)
    earlier = [base, *sorted(glob.glob(f"{glob.escape(base)}-restart-*"))]
    saved = [folder for folder in earlier if restart and has_checkpoint(folder)]
    if saved:
        return JobRun(saved[-1], ["--resume", *_without_starting_point(arguments), "--run-dir", saved[-1]])
    folder = f"{base}-restart-{restart}" if restart and os.path.lexists(base) else base
    # launch.sh takes the last --run-dir.
    added = [] if folder == named else ["--run-dir", folder]
    return JobRun(folder, [*arguments, *added])


def has_checkpoint(folder: str) -> bool:
    """Whether a run has a complete checkpoint."""
    return bool(glob.glob(os.path.join(glob.escape(folder), _CHECKPOINTS)))


def _run_options(arguments: Sequence[str]) -> tuple[str, bool]:
    """The value of the last `--run-dir`, or nothing, and whether there is `--resume`."""
    named = ""
    for word, following in itertools.pairwise([*arguments, ""]):
        if word == "--run-dir":
            named = following
        elif word.startswith("--run-dir="):
            named = word.removeprefix("--run-dir=")
    return named, "--resume" in arguments


def _latest_run(plan_folder: str, arguments: Sequence[str]) -> JobRun:
    """The run that launch.sh would resume. Its folder is named, so that this job knows it after its time limit."""
    runs = sorted(glob.glob(os.path.join(glob.escape(plan_folder), "runs", "*")))
    saved = [folder for folder in runs if has_checkpoint(folder)]
    if not saved:
        return JobRun("", list(arguments))
    return JobRun(saved[-1], [*arguments, "--run-dir", saved[-1]])


def _folder_of_job(plan_folder: str, job: str) -> str:
    """The run folder that an earlier start of the job made, or the name of a new one."""
    runs = os.path.join(plan_folder, "runs")
    made = [
        path for path in sorted(glob.glob(os.path.join(glob.escape(runs), f"*-slurm-{job}"))) if os.path.isdir(path)
    ]
    return made[0] if made else os.path.join(runs, f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-slurm-{job}")


def _without_starting_point(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that say where to begin and in which folder."""
    kept = []
    words = iter(arguments)
    for word in words:
        if word in _STARTING_POINTS:
            next(words, None)
        elif word != "--resume" and word.partition("=")[0] not in _STARTING_POINTS:
            kept.append(word)
    return kept
