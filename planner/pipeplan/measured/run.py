"""A run folder, as the executor leaves it: `summary.json` and the timelines of its workers (docs/executor.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.files import Node, read_document

SUMMARY, SUMMARY_FORMAT, SUMMARY_VERSION = "summary.json", "pipeplan-summary", 1
TIMELINE_FORMAT, TIMELINE_VERSION = "pipeplan-timeline", 1
FORWARD, BACKWARD, UPDATE, WAIT, ALL_REDUCE = "forward", "backward", "update", "wait", "all-reduce"
KINDS = (FORWARD, BACKWARD, UPDATE, WAIT, ALL_REDUCE)
MOST = 100_000
"""Minibatches of a timeline, far beyond what is recorded: a replay of so many takes a minute."""


@dataclass(frozen=True)
class Interval:
    """What a worker did for a while. All but all-reduces, which go on in the background, come one after the other."""

    kind: str
    """One of `KINDS`. A wait is for tensors of another stage, or for an all-reduce where an update comes next. A
    backward pass may come in parts: a second forward pass, the pass, and what is left to do with its gradients."""
    number: int
    """The minibatch, from 0 in the epoch; of an update, an all-reduce and the wait for it the group of minibatches."""
    start_s: float
    """Since the begin of the recorded epoch, which is the same moment for all workers."""
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """What one worker did for the first minibatches of an epoch."""

    rank: int
    stage: int
    replica: int
    epoch: int
    """From 0."""
    epoch_minibatches: int
    """So many minibatches the epoch has."""
    first: int
    """The first minibatch recorded: 0 but where a run went on in the middle of the epoch."""
    minibatches: int
    """So many minibatches of the pipeline are recorded."""
    intervals: tuple[Interval, ...]
    """In the order of their starts."""


@dataclass(frozen=True)
class Run:
    """What a run measured."""

    folder: Path
    plan: str
    """The digest of the plan that ran."""
    summary: Node
    """All of summary.json."""
    recorded: Mapping[int, Timeline] = field(default_factory=dict)
    """By rank; empty where the run recorded none."""

    @cached_property
    def timelines(self) -> dict[int, tuple[Interval, ...]]:
        """By rank; empty where the run recorded none."""
        return {rank: timeline.intervals for rank, timeline in self.recorded.items()}


def read(folder: Path) -> Run:
    """Read a run folder, or the latest run of a plan folder. Raises `InputError` where that is none, or is damaged."""
    if (folder / "plan.json").is_file():
        folder = latest(folder)
    path = folder / SUMMARY
    if not path.is_file():
        what = _why_not(folder)
        raise InputError(f"{folder} {what}: name the folder of a run that came to its end, as in PLAN/runs/…")
    summary = read_document(path, SUMMARY_FORMAT, SUMMARY_VERSION)
    plan = summary["plan"].text()
    timelines = [_timeline(one, plan) for one in sorted((folder / "timeline").glob("rank-*.json"))]
    recorded = {timeline.rank: timeline for timeline in timelines if timeline is not None}
    if len({(timeline.epoch, timeline.first) for timeline in recorded.values()}) > 1:
        raise InputError(f"{folder / 'timeline'} has files of different epochs: the run was cut off, so run it again")
    return Run(folder, plan, summary, dict(sorted(recorded.items())))


def read_of(plan_folder: Path, folder: Path | None = None) -> Run:
    """Read a run of this plan, the latest unless one is named. Raises `InputError`, also where it is of another."""
    run = read(plan_folder if folder is None else folder)
    stage = read_document(plan_folder / "stages" / "stage-0.json", "pipeplan-stage", 1)
    if run.plan != stage["plan"].text():
        raise InputError(f"{run.folder} is a run of another plan than {plan_folder} has now: name a run of this one")
    return run


def latest(plan_folder: Path) -> Path:
    """The latest run of a plan folder that has a summary. Raises `InputError` where there is none."""
    runs = sorted(path.parent for path in plan_folder.glob(f"runs/*/{SUMMARY}"))
    if not runs:
        raise InputError(f"{plan_folder} has no run that came to its end: run {plan_folder}/launch.sh, or name a run")
    return runs[-1]


def _why_not(folder: Path) -> str:
    if not folder.exists():
        return "does not exist"
    if not folder.is_dir():
        return "is not a folder"
    error = folder / "error.txt"
    if error.is_file():
        return f"is of a run that ended in an error ({error}), without a {SUMMARY}"
    return f"has no {SUMMARY}"


def _timeline(path: Path, plan: str) -> Timeline | None:
    """One worker's; None where it is of another plan, that the run began with."""
    root = read_document(path, TIMELINE_FORMAT, TIMELINE_VERSION)
    if root["plan"].text() != plan:
        return None
    first, minibatches, whole = (root[name].integer() for name in ("first", "minibatches", "epoch_minibatches"))
    if first + minibatches > whole or minibatches > MOST:
        root["minibatches"].fail(f"{minibatches} from minibatch {first} on are more than an epoch of {whole} has here")
    return Timeline(
        rank=root["rank"].integer(),
        stage=root["stage"].integer(),
        replica=root["replica"].integer(),
        epoch=root["epoch"].integer(),
        epoch_minibatches=whole,
        first=first,
        minibatches=minibatches,
        intervals=tuple(_interval(node) for node in root["intervals"].items()),
    )


def _interval(node: Node) -> Interval:
    fields = node.items()
    if len(fields) != 4:
        node.fail(f"expected a kind, a number, a start and an end, found {len(fields)} values")
    kind, number, start, end = fields
    if kind.text() not in KINDS:
        kind.fail(f"expected one of {', '.join(KINDS)}, found {kind.text()!r}")
    start_s = start.number()
    return Interval(kind.text(), number.integer(), start_s, end.number(minimum=start_s))
