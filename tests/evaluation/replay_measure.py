"""The measurements of a replay, from its run folder, between filling and draining.

All times of a `ReplayResult` are seconds on the plan's own hardware, not of the emulation.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_network import Scaling

from pipeplan.errors import InputError
from pipeplan.simulation.scenario import Scenario


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

    def busy(self, step_time_s: float) -> float:
        """Share of time for which its replicas compute."""
        return self.computing_s / (self.replicas * step_time_s)

    def predicted_busy(self, step_time_s: float) -> float:
        """Predicted share of time for which its replicas compute, at the plan's step time."""
        return self.predicted_s / (self.replicas * step_time_s)


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay. Times are seconds per minibatch."""

    config: str
    predicted_s: float
    simulated_s: float | None
    """Of the simulation of the same schedule; None without a steady state."""
    measured_s: float
    spread: float
    """Relative standard error of the measured time, from parts of the run."""
    minibatches: int
    """Number of measured minibatches."""
    scaling: Scaling
    stages: tuple[ReplayedStage, ...]
    seconds: float
    """Duration of the replay, including its start and end."""

    @property
    def error(self) -> float:
        """Measured over predicted time, less 1: above 0 the plan is slower than predicted."""
        return self.measured_s / self.predicted_s - 1


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
    def step_time_s(self) -> float:
        """Seconds per minibatch, of the emulation."""
        return (self.ends_s[-1] - self.ends_s[0]) / (self.last - self.first)

    @property
    def spread(self) -> float:
        """Relative standard error of the step time, from parts of the window; 0 where there are too few."""
        count = len(self.ends_s) - 1
        parts = min(PARTS, count)
        if parts < 2:
            return 0.0
        marks = [self.ends_s[number * count // parts] for number in range(parts + 1)]
        sizes = [(number + 1) * count // parts - number * count // parts for number in range(parts)]
        step_times = [(marks[n + 1] - marks[n]) / (sizes[n] * self.step) for n in range(parts)]
        return statistics.stdev(step_times) / math.sqrt(parts) / self.step_time_s


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
