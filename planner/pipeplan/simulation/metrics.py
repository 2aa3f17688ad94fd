"""Measures a simulation: step time, fill and drain, shares of busy time, minibatches in flight, memory."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pipeplan.simulation.events import SimulatedEvents
from pipeplan.simulation.memory import memory_over_time, peak_memory
from pipeplan.simulation.scenario import Scenario
from pipeplan_launch.plan.schedule import ActionKind

SIMULATION_FORMAT, SIMULATION_VERSION = "pipeplan-simulation", 1
LONGEST_ROUND = 2000
"""Largest round, in minibatches. With replica counts that have no common divisor, the schedule repeats only after very
many minibatches. Then the round of the stage that finishes minibatches is used (in training the first stage)."""
LEAST_WINDOW = 100
"""Smallest number of minibatches in the steady part."""
WARM_UP, LEAST_WARM_UP = 20, 3
"""Usual and smallest length of the warm-up, as a multiple of the minibatches in flight. The warm-up is long because a
first stage that is only slightly faster than the step time takes long to use up its depth."""
WINDOW, SHORTEST_WINDOW = 10, 2
"""Usual and smallest length of the steady part, as a multiple of the minibatches in flight."""
LARGE_SIMULATION = 10_000
"""Number of minibatches above which the usual lengths are shortened, down to the smallest lengths."""


@dataclass(frozen=True)
class SteadyPart:
    """The part of a simulation in which the pipeline neither fills nor drains."""

    first: int
    """Number of minibatches that have finished when the part begins."""
    last: int
    """Number of minibatches that have finished when the part ends."""
    start_s: float
    end_s: float

    @property
    def step_time_s(self) -> float:
        """Seconds per minibatch in the steady part."""
        return (self.end_s - self.start_s) / (self.last - self.first)


@dataclass(frozen=True)
class SimulatedStage:
    """The summary of one stage.

    Shares refer to the time of its replicas in the steady part, or in the whole simulation if there is no steady
    part."""

    replicas: int
    depth: int
    peak_in_flight: int
    """Largest number of minibatches that a replica had in flight at once."""
    computing: float
    """Share of time in forward and backward passes."""
    synchronising: float
    """Share of time in the exposed part of all-reduces."""
    held_bytes: int
    """Peak memory of the minibatches in flight in bytes, without weight versions."""
    peak_bytes: int
    """Peak memory of one worker, in bytes."""
    memory_bytes: int
    """Memory of one worker according to the plan, in bytes."""


@dataclass(frozen=True)
class SimulationReport:
    """The summary of a simulation. Each figure is computed when it is needed."""

    scenario: Scenario
    replayed: SimulatedEvents
    minibatches: int

    @property
    def total_s(self) -> float:
        """Time of the last event."""
        return self.replayed.end_s

    @cached_property
    def steady(self) -> SteadyPart | None:
        """The steady part; None if there were too few minibatches.

        The part is a whole number of rounds between warm-up and drain, so that bursts of replicas cancel out.
        """
        finished = exit_times(self.scenario, self.replayed)
        # Until `last` minibatches have finished, new ones still enter the pipeline.
        last = min(self.minibatches, len(finished)) - _tail(self.scenario)
        first = min(_warm_up(self.scenario), last // 2)
        length = round_length(self.scenario)
        first = last - (last - first) // length * length
        if first < 1 or last <= first:
            return None
        return SteadyPart(first, last, finished[first - 1], finished[last - 1])

    @property
    def ratio(self) -> float | None:
        """Simulated step time divided by the predicted step time: above 1 the plan is slower than predicted."""
        if self.steady is None or self.scenario.predicted_s <= 0:
            return None
        return self.steady.step_time_s / self.scenario.predicted_s

    @property
    def fill_s(self) -> float:
        """Time until every stage has begun, in seconds."""
        begun: dict[int, float] = {}
        for done in self.replayed.passes:
            begun[done.stage] = min(begun.get(done.stage, math.inf), done.start_s)
        return max(begun.values(), default=0.0)

    @property
    def drain_s(self) -> float:
        """Time from the end of the first finished stage to the end of the last, in seconds."""
        ended: dict[int, float] = {}
        for done in self.replayed.passes:
            ended[done.stage] = max(ended.get(done.stage, 0.0), done.end_s)
        return self.total_s - min(ended.values(), default=self.total_s)

    @cached_property
    def stages(self) -> tuple[SimulatedStage, ...]:
        """The summary of every stage."""
        start, end = self._measured
        computing, synchronising = defaultdict[int, float](float), defaultdict[int, float](float)
        for stage, _, action, since, until in self.replayed.passes:
            updates = action.kind is ActionKind.UPDATE
            waited = until - self.scenario.stages[stage].step_s if updates else since  # the step is computing
            synchronising[stage] += _inside(since, waited, start, end)
            computing[stage] += _inside(waited, until, start, end)
        peaks = peak_in_flight(self.scenario, self.replayed)
        memory = peak_memory(self.scenario, memory_over_time(self.scenario, self.replayed, self.minibatches))
        return tuple(
            SimulatedStage(
                replicas=load.replicas,
                depth=load.depth,
                peak_in_flight=peaks[index],
                computing=computing[index] / ((end - start) * load.replicas) if end > start else 0.0,
                synchronising=synchronising[index] / ((end - start) * load.replicas) if end > start else 0.0,
                held_bytes=peaks[index] * load.minibatch_bytes,
                peak_bytes=memory[index],
                memory_bytes=load.memory_bytes,
            )
            for index, load in enumerate(self.scenario.stages)
        )

    @cached_property
    def links(self) -> dict[str, float]:
        """Share of the time for which each link, or any pair of workers at a boundary, was busy.

        Links that were never busy are left out.
        """
        start, end = self._measured
        busy, until_s = defaultdict[str, float](float), defaultdict[str, float](lambda: start)
        for transfer in self.replayed.transfers:  # in the order of their starts
            row = transfer.row
            busy[row] += _inside(max(transfer.start_s, until_s[row]), transfer.end_s, start, end)
            until_s[row] = max(until_s[row], transfer.end_s)
        return {row: seconds / (end - start) for row, seconds in sorted(busy.items())} if end > start else {}

    @property
    def _measured(self) -> tuple[float, float]:
        """Start and end of the steady part, or of the whole simulation if there is no steady part."""
        return (0.0, self.total_s) if self.steady is None else (self.steady.start_s, self.steady.end_s)

    def to_json(self) -> dict[str, Any]:
        """The document that `pipeplan simulate --json` prints."""
        steady = self.steady and asdict(self.steady) | {"minibatch_s": self.steady.step_time_s}
        return {
            "format": SIMULATION_FORMAT,
            "version": SIMULATION_VERSION,
            "config": self.scenario.config,
            "schedule": self.scenario.schedule.name,
            "accumulate": self.scenario.accumulate,
            "minibatches": self.minibatches,
            "total_s": self.total_s,
            "predicted_s": self.scenario.predicted_s,
            "steady": steady,
            "fill_s": self.fill_s,
            "drain_s": self.drain_s,
            "stages": tuple(asdict(stage) for stage in self.stages),
            "links": self.links,
            "ratio": self.ratio,
        }


def enough_minibatches(scenario: Scenario) -> int:
    """Number of minibatches that leaves a steady part of whole rounds between fill and drain."""
    length = round_length(scenario)
    window = max(_scaled(scenario, WINDOW, SHORTEST_WINDOW), LEAST_WINDOW)
    return _warm_up(scenario) + length * math.ceil(window / length) + _tail(scenario) + 1


def _warm_up(scenario: Scenario) -> int:
    """Number of minibatches before the steady part."""
    if scenario.drains and scenario.accumulate:
        # Under a flush every batch runs like the first, except for delays from earlier all-reduces.
        return LEAST_WARM_UP * scenario.accumulate
    return _scaled(scenario, WARM_UP, LEAST_WARM_UP)


def _tail(scenario: Scenario) -> int:
    """Number of minibatches after the steady part: the minibatches in flight, or under a flush a last, short group."""
    if scenario.drains and scenario.accumulate:
        return scenario.accumulate
    return scenario.in_flight


def _scaled(scenario: Scenario, usual: int, least: int) -> int:
    """A number of minibatches, from its usual and smallest multiples of the minibatches in flight."""
    return max(least * scenario.in_flight, min(usual * scenario.in_flight, LARGE_SIMULATION))


def round_length(scenario: Scenario) -> int:
    """Number of minibatches after which the replicas' turns and the stages' groups repeat."""
    group = scenario.accumulate or 1
    length = math.lcm(group, *(stage.replicas for stage in scenario.stages))
    return length if length <= LONGEST_ROUND else math.lcm(group, scenario.stages[_exit(scenario)].replicas)


def exit_times(scenario: Scenario, replayed: SimulatedEvents) -> list[float]:
    """The times at which minibatches left the pipeline, in increasing order."""
    kind = ActionKind.BACKWARD if scenario.schedule.trains else ActionKind.FORWARD
    return replayed.finished(_exit(scenario), kind)


def _exit(scenario: Scenario) -> int:
    """The stage where minibatches leave the pipeline; in training this is the first."""
    return 0 if scenario.schedule.trains else len(scenario.stages) - 1


def summarise_simulation(scenario: Scenario, replayed: SimulatedEvents, minibatches: int) -> SimulationReport:
    """Summarise a simulation of `minibatches` minibatches."""
    return SimulationReport(scenario, replayed, minibatches)


def peak_in_flight(scenario: Scenario, replayed: SimulatedEvents) -> list[int]:
    """For each stage, the most minibatches that one replica had in flight at once."""
    peaks, counts = [0] * len(scenario.stages), Counter[tuple[int, int]]()
    for stage, replica, action, _, _ in replayed.actions:
        counts[stage, replica] += action.kind is ActionKind.FORWARD
        peaks[stage] = max(peaks[stage], counts[stage, replica])
        last = ActionKind.WEIGHTS if scenario.stages[stage].deferred else ActionKind.BACKWARD
        counts[stage, replica] -= action.kind is (last if scenario.schedule.trains else ActionKind.FORWARD)
    return peaks


def _inside(since: float, until: float, start: float, end: float) -> float:
    """Length of the intersection of two intervals."""
    return max(0.0, min(until, end) - max(since, start))
