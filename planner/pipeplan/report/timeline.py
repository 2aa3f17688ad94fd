"""The pipeline over time, from its fill to the steady state, on as many workers as a drawing can show.

The simulation behind it is that of `pipeplan simulate`, or a shorter one if that would take long.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan.report.document import INTERVAL_KINDS, PipelineTimeline, table_columns
from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.simulation import metrics
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.events import SimulatedEvents
from pipeplan.simulation.memory import MemoryOverTime, memory_over_time
from pipeplan.simulation.metrics import exit_times, round_length
from pipeplan.simulation.scenario import Scenario

MAX_PASSES = 40_000
"""Most forward and backward passes that are simulated with shared network cards, which takes a few seconds."""
MAX_PASSES_WITHOUT_CARDS = 120_000
"""Most passes that are simulated without shared network cards."""
MAX_LANES = 64
MAX_INTERVALS = 12_000
"""Most intervals that are drawn, and as many that are measured."""
STEADY_TOLERANCE, STEADY_TOLERANCE_FACTOR = 0.01, 2.0
"""A round is steady if its pace differs from the steady pace by at most the share `STEADY_TOLERANCE`, or by at most
`STEADY_TOLERANCE_FACTOR` times the largest difference among the rounds that the steady pace was measured on."""
MIN_SHOWN_BEATS, MIN_SHOWN_MINIBATCHES = 3, 8
"""Number of beats of the steady part that are shown, and least number of minibatches."""
MAX_BEAT = 64
"""Most minibatches of a beat, unless it is given by the schedule or the replicas."""
LaneInterval = tuple[int, int, int, float, float]
"""Lane, kind, number, start and end (in seconds)."""
_NAMES = ("lane", "kind", "number", "start_s", "end_s")
_KIND = {
    "F": INTERVAL_KINDS.index("forward"),
    "B": INTERVAL_KINDS.index("backward"),
    "W": INTERVAL_KINDS.index("weights"),
    "U": INTERVAL_KINDS.index("update"),
}
_REDUCE = INTERVAL_KINDS.index("all-reduce")


@dataclass(frozen=True)
class ReportSimulation:
    """A simulated plan and its metrics."""

    scenario: Scenario
    replayed: SimulatedEvents
    minibatches: int
    measured: metrics.SimulationReport
    remark: str
    """A sentence on what was left out; empty if the simulation is that of `pipeplan simulate`."""

    @cached_property
    def memory(self) -> MemoryOverTime:
        """Memory of every worker over time, in bytes."""
        return memory_over_time(self.scenario, self.replayed, self.minibatches)


def simulate_for_report(scenario: Scenario) -> ReportSimulation:
    """Simulate a plan until it is steady, or for as long as a few seconds of computing allow."""
    wanted, remark = metrics.enough_minibatches(scenario), ""
    passes = (2 if scenario.schedule.trains else 1) * len(scenario.stages)
    count = wanted
    if wanted * passes > MAX_PASSES:
        scenario = replace(scenario, cards=None)
        count = min(wanted, max(MAX_PASSES_WITHOUT_CARDS // passes, 1))
        remark = "The simulation treats every link by itself, as if network cards were not shared"
        remark += "." if count == wanted else f", and it covers only {count} minibatches."
    replayed = simulate_schedule(scenario, count)
    return ReportSimulation(scenario, replayed, count, metrics.summarise_simulation(scenario, replayed, count), remark)


@dataclass(frozen=True)
class ShownLanes:
    """The workers that are shown, ordered by stage and then replica."""

    places: tuple[tuple[int, int], ...]
    """Stage and replica of every lane."""
    omitted: str
    """A sentence on the workers that are not shown; empty if all are."""

    @property
    def lane_of(self) -> dict[tuple[int, int], int]:
        """The lane of each (stage, replica)."""
        return {place: lane for lane, place in enumerate(self.places)}


def shown_lanes(scenario: Scenario) -> ShownLanes:
    """All workers, or at most `MAX_LANES` of them: the first replicas of every stage, or of evenly spaced stages."""
    stages, total = scenario.stages, sum(load.replicas for load in scenario.stages)
    if total <= MAX_LANES:
        return ShownLanes(tuple((i, r) for i, load in enumerate(stages) for r in range(load.replicas)), "")
    if len(stages) > MAX_LANES:
        selected = sorted({round(number * (len(stages) - 1) / (MAX_LANES - 1)) for number in range(MAX_LANES)})
        return ShownLanes(
            tuple((i, 0) for i in selected), f"Shown are the first workers of {len(selected)} of {len(stages)} stages."
        )
    shown = [1] * len(stages)
    # Add one worker to each stage in turn as long as there is room.
    while True:
        more = [i for i, load in enumerate(stages) if shown[i] < load.replicas][: MAX_LANES - sum(shown)]
        if not more:
            break
        for i in more:
            shown[i] += 1
    places = tuple((i, r) for i, count in enumerate(shown) for r in range(count))
    return ShownLanes(places, f"Shown are {len(places)} of {total} workers: the first replicas of every stage.")


def steady_start(simulated: ReportSimulation) -> float | None:
    """Start of the steady state in seconds: from then on all rounds of the replicas have the steady pace.

    None if the simulation found no steady state.
    """
    steady = simulated.measured.steady
    if steady is None:
        return None
    length = beat(simulated.scenario)
    times = exit_times(simulated.scenario, simulated.replayed)
    ends = [times[count - 1] for count in range(length, steady.last + 1, length)]
    rounds = [(start, abs((end - start) / (length * steady.pace_s) - 1)) for start, end in itertools.pairwise(ends)]
    near = max([STEADY_TOLERANCE, *(STEADY_TOLERANCE_FACTOR * off for start, off in rounds if start >= steady.start_s)])
    settled = [start for start, _ in itertools.takewhile(lambda round_: round_[1] <= near, reversed(rounds))]
    return settled[-1] if settled else None


def pipeline_timeline(simulated: ReportSimulation, run: MeasuredRun | None = None) -> PipelineTimeline:
    """The predicted timeline, and that of a run.

    The predicted one begins with the first minibatch. It ends after as many minibatches as the run recorded, or,
    without a run, after some rounds of the steady state.
    """
    scenario, shown = simulated.scenario, shown_lanes(simulated.scenario)
    began, recorded = steady_start(simulated), _recorded_minibatches(run)
    end_s = _predicted_end_s(simulated, began, recorded)
    predicted, predicted_end_s = _first(_intervals(simulated, shown, end_s))
    end_s = min(end_s, predicted_end_s)
    workers = [scenario.stages[stage].workers[replica] for stage, replica in shown.places]
    rows = [
        (worker, stage, scenario.server_of(worker)) for worker, (stage, _) in zip(workers, shown.places, strict=True)
    ]
    measured, measured_end_s = _first(_measured(run, workers)) if run is not None else ([], 0.0)
    return PipelineTimeline(
        lanes=table_columns(("worker", "stage", "server"), rows),
        end_s=end_s,
        steady=(began, end_s) if began is not None and began < end_s else None,
        predicted=table_columns(_NAMES, predicted),
        measured=table_columns(_NAMES, measured) if measured else None,
        measured_end_s=min(measured_end_s, max(interval[4] for interval in measured)) if measured else None,
        minibatches=sum(1 for time_s in exit_times(scenario, simulated.replayed) if time_s <= end_s),
        omitted=shown.omitted,
    )


def _recorded_minibatches(run: MeasuredRun | None) -> int | None:
    """Number of minibatches that every worker of the run recorded; None without a run."""
    return min((worker.minibatches for worker in run.recorded.values()), default=None) if run is not None else None


def _predicted_end_s(simulated: ReportSimulation, began: float | None, recorded: int | None) -> float:
    """End of the predicted part, in seconds."""
    scenario, steady = simulated.scenario, simulated.measured.steady
    if recorded is not None:
        times = exit_times(scenario, simulated.replayed)
        return times[min(recorded, len(times)) - 1] if times and recorded else simulated.replayed.end_s
    pace = scenario.predicted_s if steady is None else steady.pace_s
    shown = max(MIN_SHOWN_BEATS * beat(scenario), MIN_SHOWN_MINIBATCHES)
    since = simulated.measured.fill_s if began is None else began
    return min(since + shown * pace, simulated.replayed.end_s)


def beat(scenario: Scenario) -> int:
    """Number of minibatches after which a pipeline repeats itself: a round of all replicas.

    If such a round is long, it is the number between two updates, or a round of the replicas of the largest stage.
    """
    length = round_length(scenario)
    if length <= MAX_BEAT:
        return length
    return scenario.accumulate or max(stage.replicas for stage in scenario.stages)


def _first(intervals: list[LaneInterval]) -> tuple[list[LaneInterval], float]:
    """The first `MAX_INTERVALS` of intervals in order of start, and the time up to which they are complete."""
    if len(intervals) <= MAX_INTERVALS:
        return intervals, math.inf
    end_s = intervals[MAX_INTERVALS][3]
    return [interval for interval in intervals[:MAX_INTERVALS] if interval[3] < end_s], end_s


def _measured(run: MeasuredRun, workers: Sequence[int]) -> list[LaneInterval]:
    """The recorded intervals of the workers that are shown, in order of their start."""
    intervals = []
    for lane, worker in enumerate(workers):
        for interval in run.timelines.get(worker, ()):
            intervals.append(
                (lane, INTERVAL_KINDS.index(interval.kind), interval.number, interval.start_s, interval.end_s)
            )
    return sorted(intervals, key=_by_start)


def _intervals(simulated: ReportSimulation, shown: ShownLanes, end_s: float) -> list[LaneInterval]:
    """The simulated intervals that begin before `end_s`, in order of their start."""
    lane_of, intervals = shown.lane_of, []
    for done in simulated.replayed.passes:
        lane, kind = lane_of.get((done.stage, done.replica)), _KIND.get(done.action.kind.value)
        if lane is not None and kind is not None and done.start_s < end_s:
            intervals.append((lane, kind, done.action.index, done.start_s, done.end_s))
    reduced = {f"all-reduce of stage {stage + 1}": stage for stage, _ in shown.places}
    by_stage = _lanes_by_stage(shown.places)
    for sent in simulated.replayed.transfers:
        if sent.row in reduced and sent.start_s < end_s:
            reducing = _REDUCE, sent.number, sent.start_s, sent.end_s
            intervals += [(lane, *reducing) for lane in by_stage[reduced[sent.row]]]
    return sorted(intervals, key=_by_start)


def _by_start(interval: LaneInterval) -> tuple[float, int, int]:
    lane, kind, _, start_s, _ = interval
    return start_s, lane, kind


def _lanes_by_stage(places: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    by_stage: dict[int, list[int]] = {}
    for lane, (stage, _) in enumerate(places):
        by_stage.setdefault(stage, []).append(lane)
    return by_stage
