"""The pipeline over time, from its fill to the steady state, on as many workers as can be told apart.

The simulation behind a report: as `pipeplan simulate` has it, or a shorter one where that would take long.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan.report.document import KINDS, Timeline, columns
from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.simulation import metrics
from pipeplan.simulation.engine import SimulatedEvents, simulate_schedule
from pipeplan.simulation.memory import MemoryOverTime, memory_over_time
from pipeplan.simulation.metrics import exit_times, round_length
from pipeplan.simulation.scenario import Scenario

MOST_PASSES = 40_000
"""Forward and backward passes that are simulated with shared cards: a few seconds."""
MOST_ALONE = 120_000
"""Without them."""


@dataclass(frozen=True)
class Simulated:
    """A replay and what it shows."""

    scenario: Scenario
    replayed: SimulatedEvents
    minibatches: int
    measured: metrics.SimulationReport
    remark: str
    """What was left out of it, in words; empty where it is what `pipeplan simulate` shows."""

    @cached_property
    def memory(self) -> MemoryOverTime:
        """Bytes of every worker over time."""
        return memory_over_time(self.scenario, self.replayed, self.minibatches)


def simulate(scenario: Scenario) -> Simulated:
    """Replay a plan: enough for a steady state, or as much as fits into a few seconds."""
    wanted, remark = metrics.enough_minibatches(scenario), ""
    passes = (2 if scenario.schedule.trains else 1) * len(scenario.stages)
    count = wanted
    if wanted * passes > MOST_PASSES:
        scenario = replace(scenario, cards=None)
        count = min(wanted, max(MOST_ALONE // passes, 1))
        remark = "It is simulated with every link alone, as if network cards were not shared"
        remark += "." if count == wanted else f", and for {count} minibatches only."
    replayed = simulate_schedule(scenario, count)
    return Simulated(scenario, replayed, count, metrics.summarise_simulation(scenario, replayed, count), remark)


MOST_LANES = 64
MOST_INTERVALS = 12_000
CLOSE, BURSTS = 0.01, 2.0
"""A round this near to the steady pace is steady, or so many times as far off as those are that measure the pace."""
SHOWN, LEAST_SHOWN = 3, 8
"""Beats, and minibatches, of the steady part that are shown."""
LONGEST_BEAT = 64

Interval = tuple[int, int, int, float, float]
"""Lane, kind, number, start and end."""
_NAMES = ("lane", "kind", "number", "start_s", "end_s")
_KIND = {"F": KINDS.index("forward"), "B": KINDS.index("backward"), "U": KINDS.index("update")}
_REDUCE = KINDS.index("all-reduce")


@dataclass(frozen=True)
class Lanes:
    """The workers that are shown, by stage, then replica."""

    places: tuple[tuple[int, int], ...]
    """Stage and replica of every lane."""
    omitted: str

    @property
    def of(self) -> dict[tuple[int, int], int]:
        """The lane of a stage's replica."""
        return {place: lane for lane, place in enumerate(self.places)}


def lanes(scenario: Scenario, most: int = MOST_LANES) -> Lanes:
    """All workers; where they are too many, the first replicas of every stage, or of stages evenly apart."""
    stages, total = scenario.stages, sum(load.replicas for load in scenario.stages)
    if total <= most:
        return Lanes(tuple((i, r) for i, load in enumerate(stages) for r in range(load.replicas)), "")
    if len(stages) > most:
        chosen = sorted({round(at * (len(stages) - 1) / (most - 1)) for at in range(most)})
        return Lanes(
            tuple((i, 0) for i in chosen), f"Shown are the first workers of {len(chosen)} of {len(stages)} stages."
        )
    shown = [1] * len(stages)
    # One more for each stage in turn, as long as there is room.
    while True:
        more = [i for i, load in enumerate(stages) if shown[i] < load.replicas][: most - sum(shown)]
        if not more:
            break
        for i in more:
            shown[i] += 1
    places = tuple((i, r) for i, count in enumerate(shown) for r in range(count))
    return Lanes(places, f"Shown are {len(places)} of {total} workers: the first replicas of every stage.")


def steady_from(simulated: Simulated) -> float | None:
    """From when on every round of all replicas takes what it does in the steady part, as nearly as rounds do there."""
    steady = simulated.measured.steady
    if steady is None:
        return None
    length = beat(simulated.scenario)
    times = exit_times(simulated.scenario, simulated.replayed)
    ends = [times[at - 1] for at in range(length, steady.last + 1, length)]
    rounds = [(start, abs((end - start) / (length * steady.pace_s) - 1)) for start, end in itertools.pairwise(ends)]
    near = max([CLOSE, *(BURSTS * off for start, off in rounds if start >= steady.start_s)])
    settled = [start for start, _ in itertools.takewhile(lambda one: one[1] <= near, reversed(rounds))]
    return settled[-1] if settled else None


def timeline(simulated: Simulated, run: MeasuredRun | None = None) -> Timeline:
    """What is predicted, from the first minibatch on until the steady state has been seen for some rounds, or for as
    many minibatches as a run recorded; and what the run recorded of them.
    """
    scenario, shown = simulated.scenario, lanes(simulated.scenario)
    began, recorded = steady_from(simulated), _recorded(run)
    end_s = _until(simulated, began, recorded)
    found, cut = _first(_intervals(simulated, shown, end_s))
    end_s = min(end_s, cut)
    workers = [scenario.stages[stage].workers[replica] for stage, replica in shown.places]
    rows = [(at, stage, scenario.server_of(at)) for at, (stage, _) in zip(workers, shown.places, strict=True)]
    seen, until = _first(_measured(run, workers)) if run is not None else ([], 0.0)
    return Timeline(
        lanes=columns(("worker", "stage", "server"), rows),
        end_s=end_s,
        steady=(began, end_s) if began is not None and began < end_s else None,
        predicted=columns(_NAMES, found),
        measured=columns(_NAMES, seen) if seen else None,
        measured_end_s=min(until, max(one[4] for one in seen)) if seen else None,
        minibatches=sum(1 for time_s in exit_times(scenario, simulated.replayed) if time_s <= end_s),
        omitted=shown.omitted,
    )


def _recorded(run: MeasuredRun | None) -> int | None:
    """How many minibatches a run recorded."""
    return min((one.minibatches for one in run.recorded.values()), default=None) if run is not None else None


def _until(simulated: Simulated, began: float | None, recorded: int | None) -> float:
    """When the predicted part ends."""
    scenario, steady = simulated.scenario, simulated.measured.steady
    if recorded is not None:
        times = exit_times(scenario, simulated.replayed)
        return times[min(recorded, len(times)) - 1] if times and recorded else simulated.replayed.end_s
    pace = scenario.predicted_s if steady is None else steady.pace_s
    shown = max(SHOWN * beat(scenario), LEAST_SHOWN)
    since = simulated.measured.fill_s if began is None else began
    return min(since + shown * pace, simulated.replayed.end_s)


def beat(scenario: Scenario) -> int:
    """Minibatches after which a pipeline does the same again: a round of all replicas. Where that is long, what is
    between two updates, or a round of the replicas of the largest stage.
    """
    length = round_length(scenario)
    if length <= LONGEST_BEAT:
        return length
    return scenario.accumulate or max(stage.replicas for stage in scenario.stages)


def _first(found: list[Interval]) -> tuple[list[Interval], float]:
    """As many intervals as may be shown, in order of their start, and when they end being all there are."""
    if len(found) <= MOST_INTERVALS:
        return found, math.inf
    end_s = found[MOST_INTERVALS][3]
    return [one for one in found[:MOST_INTERVALS] if one[3] < end_s], end_s


def _measured(run: MeasuredRun, workers: Sequence[int]) -> list[Interval]:
    """What a run recorded of the workers that are shown."""
    found = []
    for lane, worker in enumerate(workers):
        for one in run.timelines.get(worker, ()):
            found.append((lane, KINDS.index(one.kind), one.number, one.start_s, one.end_s))
    return sorted(found, key=lambda one: (one[3], one[0], one[1]))


def _intervals(simulated: Simulated, shown: Lanes, end_s: float) -> list[Interval]:
    """In order of their start; what begins before the end is shown to its own end."""
    of, found = shown.of, []
    for done in simulated.replayed.passes:
        lane, kind = of.get((done.stage, done.replica)), _KIND.get(done.action.kind.value)
        if lane is not None and kind is not None and done.start_s < end_s:
            found.append((lane, kind, done.action.index, done.start_s, done.end_s))
    reduced = {f"all-reduce of stage {stage + 1}": stage for stage, _ in shown.places}
    by_stage = _lanes_by_stage(shown.places)
    for row, number, start_s, until_s in simulated.replayed.transfers:
        if row in reduced and start_s < end_s:
            found += [(lane, _REDUCE, number, start_s, until_s) for lane in by_stage[reduced[row]]]
    return sorted(found, key=lambda one: (one[3], one[0], one[1]))


def _lanes_by_stage(places: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for lane, (stage, _) in enumerate(places):
        found.setdefault(stage, []).append(lane)
    return found
