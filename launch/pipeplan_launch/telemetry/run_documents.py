"""The files of a run folder, as their types state them: `summary.json` and timelines. Torch-free.

docs/file-formats.md describes the fields. Fields with a default may be missing in files of older versions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from pipeplan_launch.typed_document import Amount, Finite, Natural, Positive, Text

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
    parts: a second forward pass, the pass itself, and the rest of the work on its gradients. `weights` are gradients of
    weights that have a pass of their own."""
    number: Natural
    """The minibatch, from 0 in the epoch. For an update, an all-reduce and the wait for it, the minibatch group."""
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
    """Number of recorded minibatches of the pipeline. Far fewer than the limit are recorded; a replay of so many takes
    a minute."""
    intervals: tuple[TimelineInterval, ...]
    """Activities in the order of their starts."""

    def __post_init__(self) -> None:
        if self.first + self.minibatches > self.epoch_minibatches:
            raise ValueError(
                f"{self.minibatches} minibatches from {self.first} on are more than an epoch of "
                f"{self.epoch_minibatches} has"
            )


class FigurePair(Struct, frozen=True):
    """A predicted and a measured value, in the same unit; null where it is not known."""

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
    """Whether stages slept in place of computing."""
    minibatch_s: FigurePair
    includes_fill: bool
    steady_minibatches: Natural
    stages: tuple[StageSummary, ...]
    cause: CauseFields | None = None
    difference_s: dict[str, Finite] = {}
    epochs: tuple[dict[str, Any], ...] = ()
