"""The document inside a report: plain values that a page draws and says, and nothing for it to compute.

Times are seconds, sizes bytes, rates bytes per second. What there may be very many of stands in columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

FORMAT, VERSION = "pipeplan-report", 1
SIGNIFICANT = 6
"""Digits of every number that is not whole."""

Columns = dict[str, list[Any]]
"""Lists of one length, by name."""


@dataclass(frozen=True)
class Bound:
    """One resource, and how long a minibatch keeps it."""

    what: str
    seconds: float
    share: float
    """Of the pace."""
    binds: bool
    """Whether the plan says that the pace is this one's."""


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
    """Of gradients that come back for what was sent."""
    parameter_bytes: int
    memory_bytes: int
    capacity_bytes: int | None
    """None where memory does not limit the plan."""
    memory_parts: list[tuple[str, int]]
    """What the memory is made of; they add up to it."""


@dataclass(frozen=True)
class Graph:
    """The layers, or groups of them, where a page is to draw them."""

    width: float
    height: float
    w: float
    h: float
    """Of every node."""
    nodes: Columns
    """name, op, layers (how many), stage, x, y, forward_s, backward_s, parameter_bytes, output_bytes."""
    edges: list[tuple[int, int]]
    bends: list[list[float]]
    """For edges that pass others: [edge, x1, y1, x2, y2, …], from producer to consumer."""
    note: str


@dataclass(frozen=True)
class Timeline:
    """What workers do over time."""

    lanes: Columns
    """worker, stage, server."""
    end_s: float
    steady: tuple[float, float] | None
    """From when the pipeline keeps its pace, to the end of what is shown."""
    predicted: Columns
    """lane, kind (of `KINDS`), number, start_s, end_s."""
    measured: Columns | None
    measured_end_s: float | None
    minibatches: int
    """That are done by the end of what is predicted."""
    omitted: str


KINDS = ("forward", "backward", "update", "wait", "all-reduce")


@dataclass(frozen=True)
class Memory:
    """What the fullest worker of a stage holds over time."""

    stage: int
    worker: int
    capacity_bytes: int | None
    planned_bytes: int
    peak_bytes: int
    """In the simulation."""
    predicted: Columns
    """t, bytes: so many from then on."""
    measured_peak_bytes: int | None


@dataclass(frozen=True)
class Link:
    """What is sent over one link or card."""

    name: str
    kind: str
    """`boundary`, `all-reduce` or `card`."""
    rate: float
    bytes_per_minibatch: float
    busy: float
    """Share of the time."""
    simulated: bool
    """Whether `busy` is from the simulation; if not it is the load over the pace."""
    measured_busy: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Another way to use the cluster."""

    name: str
    config: str
    minibatch_s: float | None
    gain: float | None
    """How many times faster the plan is."""
    remark: str


@dataclass(frozen=True)
class Report:
    """Everything that a page shows."""

    title: str
    pipeplan: str
    made: dict[str, Any]
    prediction: dict[str, Any]
    measured: dict[str, Any] | None
    stages: list[StageRow]
    graph: Graph | None
    placement: list[dict[str, Any]]
    timeline: Timeline
    links: list[Link]
    memory: list[Memory]
    comparisons: list[Comparison]
    scaling: dict[str, Any] | None
    certificate: dict[str, Any]
    words: dict[str, list[str]]
    """What there is to say of each part, in sentences."""
    notes: list[str]
    """What a reader should know of the whole."""

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON's types, with short numbers."""
        return {"format": FORMAT, "version": VERSION} | {
            one.name: short(getattr(self, one.name)) for one in fields(self)
        }


def short(value: Any) -> Any:
    """The value with numbers of few digits, whole ones as such; tuples become lists."""
    if isinstance(value, float):
        return _number(value)
    if is_dataclass(value):
        return {one.name: short(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {key: short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [short(one) for one in value]
    return value


def _number(value: float) -> float | int:
    rounded = float(f"{value:.{SIGNIFICANT}g}")
    return int(rounded) if rounded.is_integer() else rounded


def columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Columns:
    """The rows, each column a list."""
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}
