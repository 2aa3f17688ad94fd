"""Reader for run folders of the executor: `summary.json` and the workers' timelines (docs/executor.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.util.files import Node, read_document

SUMMARY, SUMMARY_FORMAT, SUMMARY_VERSION = "summary.json", "pipeplan-summary", 1
TIMELINE_FORMAT, TIMELINE_VERSION = "pipeplan-timeline", 1
FORWARD, BACKWARD, WEIGHTS, UPDATE = "forward", "backward", "weights", "update"
WAIT, ALL_REDUCE = "wait", "all-reduce"
KINDS = (FORWARD, BACKWARD, WEIGHTS, UPDATE, WAIT, ALL_REDUCE)
MOST = 100_000
"""Most minibatches of a timeline. Far fewer are recorded; a replay of this many takes a minute."""


@dataclass(frozen=True)
class TimelineInterval:
    """One activity of a worker. All-reduces run in the background; all other activities follow one another."""

    kind: str
    """One of `KINDS`. A wait is for tensors of another stage or, before an update, for an all-reduce. A backward pass
    may have several parts: a second forward pass, the pass itself, and the rest of the work on its gradients. `weights`
    are gradients of weights that have a pass of their own."""
    number: int
    """The minibatch, from 0 in the epoch. For an update, an all-reduce and the wait for it, the minibatch group."""
    start_s: float
    """Seconds since the beginning of the recorded epoch, which is the same moment for all workers."""
    end_s: float

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class WorkerTimeline:
    """The recorded activities of one worker in the first minibatches of an epoch."""

    rank: int
    stage: int
    replica: int
    epoch: int
    """Number of the epoch, from 0."""
    epoch_minibatches: int
    """Number of minibatches in the epoch."""
    first: int
    """The first recorded minibatch: 0 unless the run resumed in the middle of the epoch."""
    minibatches: int
    """Number of recorded minibatches of the pipeline."""
    intervals: tuple[TimelineInterval, ...]
    """Activities in the order of their starts."""


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements in a run folder."""

    folder: Path
    plan: str
    """Digest of the plan that ran."""
    summary: Node
    """The content of summary.json."""
    recorded: Mapping[int, WorkerTimeline] = field(default_factory=dict)
    """Timelines by rank; empty where the run recorded none."""

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
    summary = read_document(path, SUMMARY_FORMAT, SUMMARY_VERSION)
    plan = summary["plan"].text()
    timelines = [_timeline(path, plan) for path in sorted((folder / "timeline").glob("rank-*.json"))]
    recorded = {timeline.rank: timeline for timeline in timelines if timeline is not None}
    if len({(timeline.epoch, timeline.first) for timeline in recorded.values()}) > 1:
        raise InputError(f"{folder / 'timeline'} has files of different epochs: the run was cut off, so run it again")
    return MeasuredRun(folder, plan, summary, dict(sorted(recorded.items())))


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


def _timeline(path: Path, plan: str) -> WorkerTimeline | None:
    """The timeline of one worker; None where it belongs to an earlier plan of the run."""
    root = read_document(path, TIMELINE_FORMAT, TIMELINE_VERSION)
    if root["plan"].text() != plan:
        return None
    first, minibatches, whole = (root[name].integer() for name in ("first", "minibatches", "epoch_minibatches"))
    if first + minibatches > whole or minibatches > MOST:
        root["minibatches"].fail(f"{minibatches} from minibatch {first} on are more than an epoch of {whole} has here")
    return WorkerTimeline(
        rank=root["rank"].integer(),
        stage=root["stage"].integer(),
        replica=root["replica"].integer(),
        epoch=root["epoch"].integer(),
        epoch_minibatches=whole,
        first=first,
        minibatches=minibatches,
        intervals=tuple(_interval(node) for node in root["intervals"].items()),
    )


def _interval(node: Node) -> TimelineInterval:
    fields = node.items()
    if len(fields) != 4:
        node.fail(f"expected a kind, a number, a start and an end, found {len(fields)} values")
    kind, number, start, end = fields
    if kind.text() not in KINDS:
        kind.fail(f"expected one of {', '.join(KINDS)}, found {kind.text()!r}")
    start_s = start.number()
    return TimelineInterval(kind.text(), number.integer(), start_s, end.number(minimum=start_s))
