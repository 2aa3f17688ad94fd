"""Reader for run folders of the executor: `summary.json` and the workers' timelines (docs/file-formats.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.util.files import read_document
from pipeplan.util.typed import decode
from pipeplan_launch.telemetry.run_folder import ALL_REDUCE as ALL_REDUCE
from pipeplan_launch.telemetry.run_folder import BACKWARD as BACKWARD
from pipeplan_launch.telemetry.run_folder import FORWARD as FORWARD
from pipeplan_launch.telemetry.run_folder import (
    SUMMARY_FORMAT,
    SUMMARY_VERSION,
    TIMELINE_FORMAT,
    TIMELINE_VERSION,
    SummaryFile,
    TimelineFile,
)
from pipeplan_launch.telemetry.run_folder import UPDATE as UPDATE
from pipeplan_launch.telemetry.run_folder import WAIT as WAIT
from pipeplan_launch.telemetry.run_folder import WEIGHTS as WEIGHTS
from pipeplan_launch.telemetry.run_folder import StageSummary as StageSummary
from pipeplan_launch.telemetry.run_folder import TimelineInterval as TimelineInterval

SUMMARY = "summary.json"


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements in a run folder."""

    folder: Path
    plan: str
    """Digest of the plan that ran."""
    summary: SummaryFile
    """The content of summary.json."""
    recorded: Mapping[int, TimelineFile] = field(default_factory=dict)
    """Timelines by rank; empty where the run recorded none."""

    @property
    def where(self) -> str:
        """The path of summary.json, for errors."""
        return str(self.folder / SUMMARY)

    @cached_property
    def timelines(self) -> dict[int, tuple[TimelineInterval, ...]]:
        """The intervals of the timelines, by rank."""
        return {rank: timeline.intervals for rank, timeline in self.recorded.items()}


def read_run(folder: Path) -> MeasuredRun:
    """Read a run folder, or the latest run of a plan folder. Raises `InputError` for a missing or damaged run."""
    if (folder / "plan.json").is_file():
        folder = latest_run(folder)
    path = folder / SUMMARY
    if not path.is_file():
        problem = _problem_with(folder)
        raise InputError(f"{folder} {problem}: name the folder of a run that came to its end, as in PLAN/runs/…")
    summary = decode(read_document(path, SUMMARY_FORMAT, SUMMARY_VERSION), SummaryFile)
    timelines = [
        decode(read_document(path, TIMELINE_FORMAT, TIMELINE_VERSION), TimelineFile)
        for path in sorted((folder / "timeline").glob("rank-*.json"))
    ]
    # A timeline of another plan is left from before a run went on with this one.
    recorded = {timeline.rank: timeline for timeline in timelines if timeline.plan == summary.plan}
    if len({(timeline.epoch, timeline.first) for timeline in recorded.values()}) > 1:
        raise InputError(f"{folder / 'timeline'} has files of different epochs: the run was cut off, so run it again")
    return MeasuredRun(folder, summary.plan, summary, dict(sorted(recorded.items())))


def read_run_of_plan(plan_folder: Path, folder: Path | None = None) -> MeasuredRun:
    """Read a run of a plan: `folder`, or the latest one. Raises `InputError`, also for a run of another plan."""
    run = read_run(plan_folder if folder is None else folder)
    stage = read_document(plan_folder / "stages" / "stage-0.json", "pipeplan-stage", 1)
    if run.plan != stage["plan"].text():
        raise InputError(f"{run.folder} is a run of another plan than {plan_folder} has now: name a run of this one")
    return run


def has_runs(plan_folder: Path) -> bool:
    """Whether a plan folder has a run with a summary, which may be damaged or of an older plan."""
    return any(plan_folder.glob(f"runs/*/{SUMMARY}"))


def latest_run(plan_folder: Path) -> Path:
    """The latest run of a plan folder with a summary. Raises `InputError` where there is none."""
    if not has_runs(plan_folder):
        raise InputError(f"{plan_folder} has no run that came to its end: run {plan_folder}/launch.sh, or name a run")
    return max(path.parent for path in plan_folder.glob(f"runs/*/{SUMMARY}"))


def _problem_with(folder: Path) -> str:
    if not folder.exists():
        return "does not exist"
    if not folder.is_dir():
        return "is not a folder"
    error = folder / "error.txt"
    if error.is_file():
        return f"is of a run that ended in an error ({error}), without a {SUMMARY}"
    return f"has no {SUMMARY}"
