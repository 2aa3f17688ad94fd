"""What a replay shows: pace, fill and drain, how busy everything was, minibatches in flight."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from pipeplan.simulation.engine import Replayed
from pipeplan.simulation.memory import memory_over_time, peak_memory
from pipeplan.simulation.scenario import Scenario
from pipeplan_launch.schedule import Kind

FORMAT, VERSION = "pipeplan-simulation", 1
# Replica counts without common divisors repeat only after very many minibatches; then rounds of the stage where
# minibatches leave have to do.
LONGEST_ROUND = 2000
LEAST_WINDOW = 100
# All in units of the minibatches in flight. A first stage that is a little faster than the pace runs ahead at first,
# and finds its depth used up only after long. Large clusters, past so many minibatches, make do with the least.
WARM_UP, LEAST_WARM_UP = 20, 3
WINDOW, SHORTEST_WINDOW = 10, 2
LARGE = 10_000


@dataclass(frozen=True)
class Steady:
    """The part of a replay that is neither filling nor draining."""

    first: int
    """Minibatches finished when it begins."""
    last: int
    """Minibatches finished when it ends."""
    start_s: float
    end_s: float

    @property
    def pace_s(self) -> float:
        """Seconds per minibatch."""
        return (self.end_s - self.start_s) / (self.last - self.first)


@dataclass(frozen=True)
class StageReport:
    """One stage. Shares are of its replicas' time in the steady part (of the whole replay where there is none)."""

    replicas: int
    depth: int
    peak_in_flight: int
    """The most minibatches that a replica held at once."""
    computing: float
    synchronising: float
    """Held up by the part of all-reduces that does not hide."""
    held_bytes: int
    """What the minibatches in flight need at the peak, versions of the weights apart."""
    peak_bytes: int
    """The most that a worker held of all that the plan reckons with."""
    memory_bytes: int
    """What the plan reckons with for one worker."""


@dataclass(frozen=True)
class Report:
    """What a replay shows."""

    config: str
    schedule: str
    accumulate: int | None
    minibatches: int
    total_s: float
    predicted_s: float
    steady: Steady | None
    """None where there were too few minibatches for one."""
    fill_s: float
    """Until every stage has begun."""
    drain_s: float
    """From when the first stage is done until all are."""
    stages: tuple[StageReport, ...]
    links: dict[str, float]
    """Share of the time that each link was busy, those that were at all."""

    @property
    def ratio(self) -> float | None:
        """Replayed pace over the predicted one: above 1 the plan is slower than promised."""
        if self.steady is None or self.predicted_s <= 0:
            return None
        return self.steady.pace_s / self.predicted_s

    def to_json(self) -> dict[str, Any]:
        """All of it, and the derived figures."""
        steady = None if self.steady is None else asdict(self.steady) | {"minibatch_s": self.steady.pace_s}
        return {"format": FORMAT, "version": VERSION} | asdict(self) | {"steady": steady, "ratio": self.ratio}


def enough_minibatches(scenario: Scenario) -> int:
    """So many that a steady part of whole rounds is left between filling and draining."""
    length = round_length(scenario)
    window = max(_scaled(scenario, WINDOW, SHORTEST_WINDOW), LEAST_WINDOW)
    return _warm_up(scenario) + length * math.ceil(window / length) + _tail(scenario) + 1


def _warm_up(scenario: Scenario) -> int:
    if scenario.drains and scenario.accumulate:
        # Every batch is like the first but for what the all-reduces before it delay.
        return LEAST_WARM_UP * scenario.accumulate
    return _scaled(scenario, WARM_UP, LEAST_WARM_UP)


def _tail(scenario: Scenario) -> int:
    """Minibatches at the end which are not those of a steady state: with a flush those of a last, short group."""
    if scenario.drains and scenario.accumulate:
        return scenario.accumulate
    return scenario.in_flight


def _scaled(scenario: Scenario, usual: int, least: int) -> int:
    """Minibatches, from multiples of those in flight."""
    return max(least * scenario.in_flight, min(usual * scenario.in_flight, LARGE))


def round_length(scenario: Scenario) -> int:
    """Minibatches after which every stage has the same replica's turn again, and the same place in its group."""
    group = scenario.accumulate or 1
    length = math.lcm(group, *(stage.replicas for stage in scenario.stages))
    return length if length <= LONGEST_ROUND else math.lcm(group, scenario.stages[_exit(scenario)].replicas)


def exit_times(scenario: Scenario, replayed: Replayed) -> list[float]:
    """When minibatches left, in order of time."""
    kind = Kind.BACKWARD if scenario.schedule.trains else Kind.FORWARD
    return replayed.finished(_exit(scenario), kind)


def _exit(scenario: Scenario) -> int:
    """The stage where minibatches leave: training brings them back to the first."""
    return 0 if scenario.schedule.trains else len(scenario.stages) - 1


def measure(scenario: Scenario, replayed: Replayed, minibatches: int) -> Report:
    """Measure a replay of so many minibatches."""
    steady = _steady(scenario, replayed, minibatches)
    start, end = (0.0, replayed.end_s) if steady is None else (steady.start_s, steady.end_s)
    busy: dict[tuple[int, bool], float] = defaultdict(float)
    begun, done = defaultdict[int, float](lambda: math.inf), defaultdict[int, float](float)
    for stage, _, action, since, until in replayed.passes:
        busy[stage, action.kind is Kind.UPDATE] += _inside(since, until, start, end)
        begun[stage] = min(begun[stage], since)
        done[stage] = max(done[stage], until)
    length = max(end - start, 0.0)
    peaks = peak_in_flight(scenario, replayed)
    memory = peak_memory(scenario, memory_over_time(scenario, replayed, minibatches))
    reports = []
    for index, load in enumerate(scenario.stages):
        whole = length * load.replicas
        computing, synchronising = (busy[index, update] / whole if whole > 0 else 0.0 for update in (False, True))
        reports.append(
            StageReport(
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
    return Report(
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
    )


def _steady(scenario: Scenario, replayed: Replayed, minibatches: int) -> Steady | None:
    """Between warm-up and drain, a whole number of rounds: replicas finish in bursts, which then cancel out."""
    finished = exit_times(scenario, replayed)
    # Until so many have finished, minibatches still enter at the other end.
    last = min(minibatches, len(finished)) - _tail(scenario)
    first = min(_warm_up(scenario), last // 2)
    length = round_length(scenario)
    first = last - (last - first) // length * length
    if first < 1 or last <= first:
        return None
    return Steady(first, last, finished[first - 1], finished[last - 1])


def peak_in_flight(scenario: Scenario, replayed: Replayed) -> list[int]:
    """For each stage, the most minibatches that one replica had between their forward and their backward."""
    peaks = [0] * len(scenario.stages)
    for (stage, _), counts in in_flight(scenario, replayed).items():
        peaks[stage] = max([peaks[stage], *(count for _, count in counts)])
    return peaks


def in_flight(scenario: Scenario, replayed: Replayed) -> dict[tuple[int, int], list[tuple[float, int]]]:
    """For each worker (stage, replica), how many minibatches it holds from when on (seconds)."""
    counts: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for stage, replica, action, since, until in replayed.passes:
        steps = counts[stage, replica]
        held = steps[-1][1] if steps else 0
        if action.kind is Kind.FORWARD:
            steps.append((since, held + 1))
        if action.kind is Kind.BACKWARD or (action.kind is Kind.FORWARD and not scenario.schedule.trains):
            steps.append((until, steps[-1][1] - 1))
    return counts


def _link_shares(replayed: Replayed, start: float, end: float) -> dict[str, float]:
    busy: dict[str, float] = defaultdict(float)
    for row, _, since, until in replayed.transfers:
        busy[row] += _inside(since, until, start, end)
    return {row: seconds / (end - start) for row, seconds in sorted(busy.items())} if end > start else {}


def _inside(since: float, until: float, start: float, end: float) -> float:
    """How much of an interval lies in another one."""
    return max(0.0, min(until, end) - max(since, start))
