"""Measures a simulation: pace, fill and drain, shares of busy time, minibatches in flight, memory."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from pipeplan.simulation.events import SimulatedEvents
from pipeplan.simulation.memory import memory_over_time, peak_memory
from pipeplan.simulation.scenario import Scenario
from pipeplan_launch.plan.schedule import ActionKind

SIMULATION_FORMAT, SIMULATION_VERSION = "pipeplan-simulation", 1
LONGEST_ROUND = 2000
"""Largest round, in minibatches. Replica counts without common divisors repeat only after very many minibatches; then a
round of the stage where minibatches leave is used instead."""
LEAST_WINDOW = 100
"""Least number of minibatches in the steady part."""
WARM_UP, LEAST_WARM_UP = 20, 3
"""Usual and least length of the warm-up, as a multiple of the minibatches in flight. It is long because a first stage
that is slightly faster than the pace runs ahead at first, and takes long to use up its depth."""
WINDOW, SHORTEST_WINDOW = 10, 2
"""Usual and least length of the steady part, as a multiple of the minibatches in flight."""
LARGE_SIMULATION = 10_000
"""Number of minibatches above which the usual lengths are cut, at most to the least ones."""


@dataclass(frozen=True)
class SteadyPart:
    """The part of a simulation in which the pipeline neither fills nor drains."""

    first: int
    """Number of minibatches finished when it begins."""
    last: int
    """Number of minibatches finished when it ends."""
    start_s: float
    end_s: float

    @property
    def pace_s(self) -> float:
        """Seconds per minibatch."""
        return (self.end_s - self.start_s) / (self.last - self.first)


@dataclass(frozen=True)
class SimulatedStage:
    """The summary of one stage. Shares are of its replicas' time in the steady part, or in the whole simulation where
    there is no steady part."""

    replicas: int
    depth: int
    peak_in_flight: int
    """Most minibatches that a replica had in flight at once."""
    computing: float
    """Share of time in forward and backward passes."""
    synchronising: float
    """Share of time in the exposed part of all-reduces."""
    held_bytes: int
    """Peak memory of the minibatches in flight, without weight versions."""
    peak_bytes: int
    """Peak memory of one worker."""
    memory_bytes: int
    """Memory of one worker according to the plan."""


@dataclass(frozen=True)
class SimulationReport:
    """The summary of a simulation. Its fields are those of `pipeplan simulate --json`."""

    config: str
    schedule: str
    accumulate: int | None
    minibatches: int
    total_s: float
    predicted_s: float
    steady: SteadyPart | None
    """The steady part; None where there were too few minibatches for one."""
    fill_s: float
    """Time until every stage has begun."""
    drain_s: float
    """Time from the end of the first stage that finishes to the end of the last."""
    stages: tuple[SimulatedStage, ...]
    links: dict[str, float]
    """Share of the time for which each link was busy, without links that never were."""
    transport: str = "gloo"
    """The transport whose order messages keep."""

    @property
    def ratio(self) -> float | None:
        """Simulated pace divided by the predicted pace: above 1 the plan is slower than predicted."""
        if self.steady is None or self.predicted_s <= 0:
            return None
        return self.steady.pace_s / self.predicted_s

    def to_json(self) -> dict[str, Any]:
        """All fields and the derived figures, as JSON."""
        steady = None if self.steady is None else asdict(self.steady) | {"minibatch_s": self.steady.pace_s}
        return (
            {"format": SIMULATION_FORMAT, "version": SIMULATION_VERSION}
            | asdict(self)
            | {"steady": steady, "ratio": self.ratio}
        )


def enough_minibatches(scenario: Scenario) -> int:
    """Number of minibatches that leaves a steady part of whole rounds between filling and draining."""
    length = round_length(scenario)
    window = max(_scaled(scenario, WINDOW, SHORTEST_WINDOW), LEAST_WINDOW)
    return _warm_up(scenario) + length * math.ceil(window / length) + _tail(scenario) + 1


def _warm_up(scenario: Scenario) -> int:
    """Minibatches before the steady part."""
    if scenario.drains and scenario.accumulate:
        # Every batch is like the first, except for the delay by the all-reduces before it.
        return LEAST_WARM_UP * scenario.accumulate
    return _scaled(scenario, WARM_UP, LEAST_WARM_UP)


def _tail(scenario: Scenario) -> int:
    """Minibatches after the steady part: those in flight, or under a flush those of a last, short group."""
    if scenario.drains and scenario.accumulate:
        return scenario.accumulate
    return scenario.in_flight


def _scaled(scenario: Scenario, usual: int, least: int) -> int:
    """A number of minibatches, from its usual and least multiples of the minibatches in flight."""
    return max(least * scenario.in_flight, min(usual * scenario.in_flight, LARGE_SIMULATION))


def round_length(scenario: Scenario) -> int:
    """Number of minibatches after which the turns of all replicas and the groups of all stages repeat."""
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
    steady = _steady(scenario, replayed, minibatches)
    start, end = (0.0, replayed.end_s) if steady is None else (steady.start_s, steady.end_s)
    busy: dict[tuple[int, bool], float] = defaultdict(float)
    begun, done = defaultdict[int, float](lambda: math.inf), defaultdict[int, float](float)
    for stage, _, action, since, until in replayed.passes:
        updates = action.kind is ActionKind.UPDATE
        waited = until - scenario.stages[stage].step_s if updates else since  # the optimiser's step is computing
        busy[stage, True] += _inside(since, waited, start, end)
        busy[stage, False] += _inside(waited, until, start, end)
        begun[stage] = min(begun[stage], since)
        done[stage] = max(done[stage], until)
    length = max(end - start, 0.0)
    peaks = peak_in_flight(scenario, replayed)
    memory = peak_memory(scenario, memory_over_time(scenario, replayed, minibatches))
    reports = []
    for index, load in enumerate(scenario.stages):
        total = length * load.replicas
        computing, synchronising = (busy[index, update] / total if total > 0 else 0.0 for update in (False, True))
        reports.append(
            SimulatedStage(
                replicas=load.replicas,
                depth=load.depth,
                peak_in_flight=peaks[index],
                computing=computing,
                synchronising=synchronising,
                held_bytes=peaks[index] * load.minibatch_bytes,
                peak_bytes=memory[index],
                memory_bytes=load.memory_bytes,
            )
        )
    return SimulationReport(
        config=scenario.config,
        schedule=scenario.schedule.name,
        accumulate=scenario.accumulate,
        minibatches=minibatches,
        total_s=replayed.end_s,
        predicted_s=scenario.predicted_s,
        steady=steady,
        fill_s=max(begun.values(), default=0.0),
        drain_s=replayed.end_s - min(done.values(), default=replayed.end_s),
        stages=tuple(reports),
        links=_link_shares(replayed, start, end),
        transport=scenario.transport,
    )


def _steady(scenario: Scenario, replayed: SimulatedEvents, minibatches: int) -> SteadyPart | None:
    """The steady part: a whole number of rounds between warm-up and drain, so that bursts of replicas cancel out."""
    finished = exit_times(scenario, replayed)
    # Until `last` minibatches have finished, new ones still enter the pipeline.
    last = min(minibatches, len(finished)) - _tail(scenario)
    first = min(_warm_up(scenario), last // 2)
    length = round_length(scenario)
    first = last - (last - first) // length * length
    if first < 1 or last <= first:
        return None
    return SteadyPart(first, last, finished[first - 1], finished[last - 1])


def peak_in_flight(scenario: Scenario, replayed: SimulatedEvents) -> list[int]:
    """For each stage, the most minibatches that one replica had in flight at once."""
    peaks = [0] * len(scenario.stages)
    for (stage, _), counts in in_flight(scenario, replayed).items():
        peaks[stage] = max([peaks[stage], *(count for _, count in counts)])
    return peaks


def in_flight(scenario: Scenario, replayed: SimulatedEvents) -> dict[tuple[int, int], list[tuple[float, int]]]:
    """For each worker (stage, replica), a list of (time in seconds, minibatches in flight from then on)."""
    counts: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    last = [ActionKind.WEIGHTS if load.deferred else ActionKind.BACKWARD for load in scenario.stages]
    for stage, replica, action, since, until in replayed.actions:
        steps = counts[stage, replica]
        count = steps[-1][1] if steps else 0
        if action.kind is ActionKind.FORWARD:
            steps.append((since, count + 1))
        if action.kind is (last[stage] if scenario.schedule.trains else ActionKind.FORWARD):
            steps.append((until, steps[-1][1] - 1))
    return counts


def _link_shares(replayed: SimulatedEvents, start: float, end: float) -> dict[str, float]:
    """The share of the time for which each link, or any of the pairs of workers at a boundary, was busy."""
    busy, until_s = defaultdict[str, float](float), defaultdict[str, float](lambda: start)
    for transfer in replayed.transfers:  # in the order of their starts
        row = transfer.row
        busy[row] += _inside(max(transfer.start_s, until_s[row]), transfer.end_s, start, end)
        until_s[row] = max(until_s[row], transfer.end_s)
    return {row: seconds / (end - start) for row, seconds in sorted(busy.items())} if end > start else {}


def _inside(since: float, until: float, start: float, end: float) -> float:
    """Length of the intersection of two intervals."""
    return max(0.0, min(until, end) - max(since, start))
