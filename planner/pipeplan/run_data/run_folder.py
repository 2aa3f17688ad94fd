"""Reads run folders of the executor (docs/file-formats.md): `summary.json`, timelines, and the latest checkpoint.

Training can resume from a checkpoint. A run folder has `checkpoints/<name>/manifest.json`, which is read without torch.
The manifest is written last, so a checkpoint with a manifest was complete. Files may still be missing if they were on
the disk of a lost server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from pipeplan.errors import InputError
from pipeplan.util.files import read_document
from pipeplan.util.typed import decode
from pipeplan_launch.checkpoint.manifest import MANIFEST_NAME, read_manifest
from pipeplan_launch.errors import LaunchError
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
    """Timelines by rank; empty if the run recorded none."""

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
        if not has_runs(folder):
            raise InputError(f"{folder} has no run that came to its end: run {folder}/launch.sh, or name a run")
        folder = max(path.parent for path in folder.glob(f"runs/*/{SUMMARY}"))
    path = folder / SUMMARY
    if not path.is_file():
        problem = _problem_with(folder)
        raise InputError(f"{folder} {problem}: name the folder of a run that came to its end, as in PLAN/runs/…")
    summary = decode(read_document(path, SUMMARY_FORMAT, SUMMARY_VERSION), SummaryFile)
    timelines = [
        decode(read_document(path, TIMELINE_FORMAT, TIMELINE_VERSION), TimelineFile)
        for path in sorted((folder / "timeline").glob("rank-*.json"))
    ]
    # A timeline of another plan comes from before the run continued with this plan.
    recorded = {timeline.rank: timeline for timeline in timelines if timeline.plan == summary.plan}
    if len({(timeline.epoch, timeline.first) for timeline in recorded.values()}) > 1:
        raise InputError(f"{folder / 'timeline'} has files of different epochs: the run was cut off, so run it again")
    return MeasuredRun(folder, summary.plan, summary, dict(sorted(recorded.items())))


def read_run_of_plan(plan_folder: Path, folder: Path | None = None) -> MeasuredRun:
    """Read a run of a plan: `folder`, or the latest run.

    Raises `InputError` for a missing run, or for a run of another plan.
    """
    run = read_run(plan_folder if folder is None else folder)
    stage = read_document(plan_folder / "stages" / "stage-0.json", "pipeplan-stage", 1)
    if run.plan != stage["plan"].text():
        raise InputError(f"{run.folder} is a run of another plan than {plan_folder} has now: name a run of this one")
    return run


def has_runs(plan_folder: Path) -> bool:
    """Whether a plan folder has a run with a summary, which may be damaged or of an older plan."""
    return any(plan_folder.glob(f"runs/*/{SUMMARY}"))


def _problem_with(folder: Path) -> str:
    if not folder.exists():
        return "does not exist"
    if not folder.is_dir():
        return "is not a folder"
    error = folder / "error.txt"
    if error.is_file():
        return f"is of a run that ended in an error ({error}), without a {SUMMARY}"
    return f"has no {SUMMARY}"


@dataclass(frozen=True)
class Checkpoint:
    """The latest complete checkpoint of a run."""

    run: Path
    folder: Path
    epoch: int
    """Epoch of the checkpoint, counted from 0."""
    minibatch: int
    """Number of minibatches of the epoch that are done."""
    minibatches: int
    """Number of minibatches of the epoch."""
    damaged: tuple[str, ...] = ()
    """The errors of later, damaged checkpoints."""
    skipped: tuple[Path, ...] = ()
    """Later runs of the plan without any checkpoint, latest first."""
    chosen: bool = False
    """Whether the user named this checkpoint itself, and not its run."""

    @property
    def resume_from(self) -> Path:
        """The path to resume from: the run, or this checkpoint if the user named it or later ones are damaged."""
        return self.folder if self.damaged or self.chosen else self.run

    @property
    def text(self) -> str:
        """The training progress at the checkpoint, in words."""
        return f"after {self.minibatch} of {self.minibatches} minibatches of epoch {self.epoch + 1}"

    def to_json(self) -> dict[str, Any]:
        """The fields of the checkpoint in `pipeplan replan --json`."""
        shown = {name: value for name, value in asdict(self).items() if name != "chosen"}
        return dict(msgspec.to_builtins(shown, enc_hook=str))


def latest_checkpoint(plan_folder: Path, named: Path | None, graph_hash: str) -> Checkpoint | None:
    """The latest complete checkpoint of `named` (a run or checkpoint), or of the latest run of the plan that has one.

    Returns None if nothing was named and there is no checkpoint. Raises `InputError` if `named` has no complete
    checkpoint, or if the hash of its model's graph is not `graph_hash` (empty: any graph).
    """
    damaged: list[str] = []
    for folder in _candidates(plan_folder, named):
        try:
            checkpoint, its_hash = _read(folder)
        except InputError as error:
            damaged.append(str(error))
            continue
        if graph_hash and its_hash != graph_hash:
            raise InputError(f"{folder} is of another model than the plan, or another version of it: graphs differ")
        later = [path for path in plan_folder.glob("runs/*") if path.is_dir() and path.name > checkpoint.run.name]
        empty = [path for path in sorted(later, reverse=True) if named is None and not _of_run(path)]
        return replace(checkpoint, damaged=tuple(damaged), chosen=folder == named, skipped=tuple(empty))
    if named is not None:
        why = f": {damaged[0]}" if damaged else ""
        raise InputError(f"--run: {named} has no complete checkpoint to go on from{why}")
    return None


def _candidates(plan_folder: Path, named: Path | None) -> Iterator[Path]:
    """Folders of checkpoints that have a manifest, latest first."""
    if named is not None and (named / MANIFEST_NAME).is_file():
        yield named
    elif named is not None:
        yield from _of_run(named)
    else:
        runs = {path.parents[2] for path in plan_folder.glob(f"runs/*/checkpoints/*/{MANIFEST_NAME}")}
        for run in sorted(runs, reverse=True):
            yield from _of_run(run)


def _of_run(run: Path) -> list[Path]:
    """Checkpoints of a run, latest first by the numbers in their names, as in `epoch-0003-sample-00000640`."""
    folders = [path.parent for path in run.glob(f"checkpoints/*/{MANIFEST_NAME}")]
    return sorted(
        folders, key=lambda folder: [int(number) for number in re.findall("[0-9]+", folder.name)], reverse=True
    )


def _read(folder: Path) -> tuple[Checkpoint, str]:
    """Read a checkpoint and the hash of its model's graph. Raises `InputError` if files are missing or damaged."""
    try:
        manifest = read_manifest(folder)
    except LaunchError as error:
        raise InputError(str(error)) from None
    at = manifest.position
    return Checkpoint(folder.parent.parent, folder, at.epoch, at.minibatch, at.minibatches), manifest.model.graph_hash
