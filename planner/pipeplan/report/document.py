"""The JSON document of a report: plain values that the page shows without further computation.

Times are in seconds, sizes in bytes, rates in bytes per second. Long tables are stored by columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pipeplan.drawing.model_graph import ModelGraph

REPORT_FORMAT, REPORT_VERSION = "pipeplan-report", 1
SIGNIFICANT_DIGITS = 6
"""Significant digits of numbers that are not integers."""

Columns = dict[str, list[Any]]
"""A table as lists of equal length, by column name."""


@dataclass(frozen=True)
class LoadRow:
    """The time for which a minibatch keeps one resource busy, and the traffic over it if it is a link."""

    name: str
    seconds: float
    share: float
    """The value of `seconds` as a share of the step time by the formulas."""
    binds: bool
    """Whether the plan names this resource as the one that limits the step time."""
    part: bool
    """Whether the row is a part of a batch under a flush schedule. The shares of all such rows add up to 1."""
    rate: float | None = None
    bytes_per_minibatch: float | None = None
    simulated_busy: float | None = None
    """Share of the simulated time in which the link is busy; None if the link is not simulated separately."""
    measured_busy: float | None = None


@dataclass(frozen=True)
class StageRow:
    """One stage of the plan."""

    index: int
    layers: int
    first: str
    last: str
    workers: list[int]
    servers: str
    depth: int
    versions: int
    recompute: bool
    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float
    send_bytes: int
    return_bytes: int
    """Bytes of the gradients that the next stage sends back."""
    parameter_bytes: int
    memory_bytes: int
    capacity_bytes: int | None
    """Smallest device memory of the stage's workers; None if memory does not limit the plan."""
    memory_parts: list[tuple[str, int]]
    """Names and bytes of the parts of `memory_bytes`, which add up to that total."""


@dataclass(frozen=True)
class PipelineTimeline:
    """The activity of workers over time, predicted and measured."""

    lanes: Columns
    """Columns: worker, stage, server."""
    end_s: float
    steady: tuple[float, float] | None
    """Start of the steady state, and end of the part that is shown."""
    predicted: Columns
    """Columns: lane, kind (an index of `INTERVAL_KINDS`), number, start_s, end_s."""
    measured: Columns | None
    measured_end_s: float | None
    minibatches: int
    """Number of minibatches that are complete at the end of the predicted part."""
    omitted: str


INTERVAL_KINDS = ("forward", "backward", "weights", "update", "all-reduce")
"""Kinds of the intervals of a timeline. Between intervals a worker waits."""


@dataclass(frozen=True)
class StageMemory:
    """Memory over time of one worker of a stage: the worker that needs the most memory."""

    stage: int
    worker: int
    capacity_bytes: int | None
    planned_bytes: int
    peak_bytes: int
    """Peak memory in the simulation, in bytes."""
    predicted: Columns
    """Columns: t, bytes. From time t on, these bytes are in use."""
    measured_peak_bytes: int | None


@dataclass(frozen=True)
class Comparison:
    """The plan itself, or an alternative to it."""

    name: str
    config: str
    minibatch_s: float | None
    gain: float | None
    """Throughput of the plan divided by that of this alternative: 2 if the plan is twice as fast."""
    remark: str


@dataclass(frozen=True)
class PlanReport:
    """All sections of a report."""

    title: str
    pipeplan: str
    made: dict[str, Any]
    prediction: dict[str, Any]
    measured: dict[str, Any] | None
    stages: list[StageRow]
    graph: ModelGraph
    placement: list[dict[str, Any]]
    timeline: PipelineTimeline
    memory: list[StageMemory]
    loads: list[LoadRow]
    comparisons: list[Comparison]
    certificate: dict[str, Any]
    words: dict[str, list[str]]
    """Sentences on the sections, by the section's name. The sentences say what the figures do not show."""
    notes: list[str]
    """Notes on the report as a whole."""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values, with rounded numbers."""
        return {"format": REPORT_FORMAT, "version": REPORT_VERSION} | {
            field.name: rounded_json(getattr(self, field.name)) for field in fields(self)
        }


def rounded_json(value: Any) -> Any:
    """The value with rounded numbers, integers where possible. Dataclasses become objects, and tuples lists."""
    if isinstance(value, float):
        rounded = float(f"{value:.{SIGNIFICANT_DIGITS}g}")
        return int(rounded) if rounded.is_integer() else rounded
    if is_dataclass(value):
        return {field.name: rounded_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: rounded_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded_json(item) for item in value]
    return value


def table_columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Columns:
    """A table of rows by columns."""
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}
