"""The measurements of a replay, from its run folder and its cables' counters, between filling and draining.

All times of a `ReplayResult` are seconds on the plan's own hardware, not of the emulation.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replay_network import HEADERS, LinkUse, NetworkPart, Scaling

from pipeplan.errors import InputError
from pipeplan.simulation.scenario import Scenario

FORMAT, VERSION = "pipeplan-replay", 1


@dataclass(frozen=True)
class ReplayedStage:
    """Mean times of one stage, in seconds per minibatch of one of its replicas."""

    replicas: int
    predicted_s: float
    """Predicted forward and backward pass, and share of the optimiser's step."""
    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float
    wait_s: float
    send_s: float

    @property
    def computing_s(self) -> float:
        """Measured forward and backward pass, and share of the optimiser's step."""
        return self.forward_s + self.backward_s + self.update_s

    def busy(self, pace_s: float) -> float:
        """Share of time for which its replicas compute."""
        return self.computing_s / (self.replicas * pace_s)

    def predicted_busy(self, pace_s: float) -> float:
        """Predicted share of time for which its replicas compute, at the plan's pace."""
        return self.predicted_s / (self.replicas * pace_s)


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay. Paces are seconds per minibatch."""

    config: str
    predicted_s: float
    """Pace by the planner."""
    simulated_s: float | None
    """Pace by the simulation of the same schedule; None without a steady state."""
    measured_s: float
    spread: float
    """Relative standard error of the measured pace, from parts of the run."""
    minibatches: int
    """Number of measured minibatches."""
    scaling: Scaling
    stages: tuple[ReplayedStage, ...]
    links: tuple[LinkUse, ...]
    seconds: float
    """Duration of the replay, including its start and end."""
    cores_busy: float | None = None
    """Share of the time for which this machine's cores were busy, with all programs."""
    unshaped: tuple[str, ...] = ()
    """Levels of the cluster whose links are not shaped."""
    cause: str = ""
    """The main cause of the difference, in a sentence."""

    @property
    def error(self) -> float:
        """Measured over predicted pace, less 1: above 0 the plan is slower than predicted."""
        return self.measured_s / self.predicted_s - 1

    def to_json(self) -> dict[str, Any]:
        """The JSON document, with derived figures."""
        stages = [
            asdict(one) | {"busy": one.busy(self.measured_s), "predicted_busy": one.predicted_busy(self.predicted_s)}
            for one in self.stages
        ]
        return {"format": FORMAT, "version": VERSION} | asdict(self) | {"stages": stages, "error": self.error}


LONGEST_ROUND = 240
PARTS = 4
TIMES = ("forward_s", "backward_s", "update_s", "sync_s", "wait_s", "send_s")


@dataclass(frozen=True)
class Window:
    """The measured minibatches, from the end of one to the end of another. Times are of the emulation."""

    first: int
    last: int
    ends_s: tuple[float, ...]
    """Times at which minibatches first … last were finished at the last stage, each `step` apart."""
    step: int
    """Number of minibatches between two of these times."""

    @property
    def pace_s(self) -> float:
        """Seconds per minibatch, of the emulation."""
        return (self.ends_s[-1] - self.ends_s[0]) / (self.last - self.first)

    @property
    def spread(self) -> float:
        """Relative standard error of the pace, from parts of the window; 0 where there are too few."""
        count = len(self.ends_s) - 1
        parts = min(PARTS, count)
        if parts < 2:
            return 0.0
        marks = [self.ends_s[number * count // parts] for number in range(parts + 1)]
        sizes = [(number + 1) * count // parts - number * count // parts for number in range(parts)]
        paces = [(marks[n + 1] - marks[n]) / (sizes[n] * self.step) for n in range(parts)]
        return statistics.stdev(paces) / math.sqrt(parts) / self.pace_s


def round_of(scenario: Scenario) -> int:
    """Number of minibatches after which the turns of all replicas repeat."""
    length = math.lcm(scenario.accumulate or 1, *(stage.replicas for stage in scenario.stages))
    last = math.lcm(scenario.accumulate or 1, scenario.stages[-1].replicas)
    return length if length <= LONGEST_ROUND else last


def warm_up(scenario: Scenario) -> int:
    """Number of minibatches until the first stage no longer runs ahead."""
    if scenario.drains and scenario.accumulate:
        return 2 * scenario.accumulate
    return (3 if len(scenario.stages) > 1 else 1) * scenario.in_flight


def window_of(scenario: Scenario, steps: Sequence[dict[str, Any]], minibatches: int) -> Window:
    """The steady part of a run, from the lines of its metrics. Raises `InputError` where there is none."""
    last_stage = len(scenario.stages) - 1
    ends = {step["minibatch"]: step["time_s"] for step in steps if step["stage"] == last_stage}
    length = round_of(scenario)
    last = minibatches - 1 - (0 if scenario.drains else min(scenario.in_flight, minibatches // 10))
    count = (last - warm_up(scenario)) // length
    if count < 1:
        raise InputError(f"{minibatches} minibatches are too few for a steady state: give more --seconds")
    marks = [last - number * length for number in range(count, -1, -1)]
    return Window(marks[0], marks[-1], tuple(ends[mark] for mark in marks), length)


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The lines of all workers' metrics."""
    return [
        json.loads(line) for path in sorted((run / "metrics").glob("*.jsonl")) for line in path.read_text().splitlines()
    ]


def stage_times(
    scenario: Scenario, steps: Sequence[dict[str, Any]], window: Window, scaling: Scaling
) -> tuple[ReplayedStage, ...]:
    """The mean times of each stage."""
    times = []
    for index, load in enumerate(scenario.stages):
        mine = [step for step in steps if step["stage"] == index and window.first < step["minibatch"] <= window.last]
        means = {name: sum(step[name] for step in mine) / len(mine) / scaling.time_by for name in TIMES}
        times.append(ReplayedStage(load.replicas, load.busy_s, **means))
    return tuple(times)


def link_uses(
    servers: NetworkPart, traffic: Sequence[dict[str, Any]], window: Window, scaling: Scaling
) -> list[LinkUse]:
    """The traffic of each shaped cable, in its busier direction."""
    cables = {part.name: part for part in servers.cables}
    busiest = []
    for counted in traffic:
        part = cables.get(counted["name"])
        if part is not None:
            uses = [_use(part, name, counted, column, window, scaling) for name, column in _DIRECTIONS]
            busiest.append(max(uses, key=lambda use: use.busy))
    return busiest


_DIRECTIONS = (("out", "out"), ("in", "into"))


def _use(
    part: NetworkPart, direction: str, counted: dict[str, Any], column: str, window: Window, scaling: Scaling
) -> LinkUse:
    start, end = window.ends_s[0], window.ends_s[-1]
    carried = (_at(counted["time_s"], counted[column], end) - _at(counted["time_s"], counted[column], start)) / HEADERS
    per_minibatch = carried / (window.last - window.first) * scaling.bytes_by
    return LinkUse(part.name, part.rate, direction, per_minibatch, carried / (end - start) / scaling.rate(part.rate))


def cores_busy(counted: dict[str, Sequence[float]], window: Window) -> float | None:
    """Share of the time for which this machine's cores were busy; None where the system does not count it."""
    start, end = window.ends_s[0], window.ends_s[-1]
    busy, ticks = (
        _at(counted["time_s"], counted[n], end) - _at(counted["time_s"], counted[n], start) for n in ("busy", "all")
    )
    return busy / ticks if ticks > 0 else None


def _at(times: Sequence[float], values: Sequence[float], when: float) -> float:
    """A counter at some time, interpolated between two readings."""
    at = bisect_left(times, when)
    if at == 0 or at == len(times):
        return values[0] if at == 0 else values[-1]
    share = (when - times[at - 1]) / (times[at] - times[at - 1])
    return values[at - 1] + share * (values[at] - values[at - 1])
