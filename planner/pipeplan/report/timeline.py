"""The pipeline over time, from its fill to the steady state, on as many workers as a drawing can show.

The timeline comes from the simulation of `pipeplan simulate`, or from a shorter one if that would take long. A trace
for Perfetto (`pipeplan.simulation.perfetto`) shows the whole simulation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeplan.report.document import INTERVAL_KINDS, PipelineTimeline, table_columns
from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.simulation import lanes
from pipeplan.simulation.metrics import enough_minibatches, exit_times, round_length
from pipeplan.simulation.scenario import Scenario
from pipeplan.simulation.simulate import Simulated, simulate

MAX_PASSES = 40_000
"""Largest number of passes that are simulated with shared network cards; simulating them takes a few seconds."""
MAX_PASSES_WITHOUT_CARDS = 120_000
"""Largest number of passes that are simulated without shared network cards."""
MAX_LANES = 64
MAX_INTERVALS = 12_000
"""Largest number of predicted intervals, and of measured intervals, that are drawn."""
STEADY_TOLERANCE, STEADY_TOLERANCE_FACTOR = 0.01, 2.0
"""A round is steady if the relative difference between its step time and the steady step time is at most the first
number, or at most the second number times the largest difference among the measured steady rounds."""
MIN_SHOWN_BEATS, MIN_SHOWN_MINIBATCHES = 3, 8
"""Smallest number of beats (see `beat`), and of minibatches, that are shown of the steady state."""
MAX_BEAT = 64
"""Largest number of minibatches of a beat, unless the schedule or the replicas fix it."""
LaneInterval = tuple[int, int, int, float, float]
"""Lane, kind, number, start and end (in seconds)."""
_NAMES = ("lane", "kind", "number", "start_s", "end_s")


@dataclass(frozen=True)
class ReportSimulation(Simulated):
    """A simulated plan."""

    remark: str = ""
    """A sentence on omissions against the simulation of `pipeplan simulate`; empty if there are none."""


def simulate_for_report(scenario: Scenario) -> ReportSimulation:
    """Simulate a plan until it is steady, or for as long as a few seconds of computing allow."""
    wanted, remark = enough_minibatches(scenario), ""
    passes = (2 if scenario.schedule.trains else 1) * len(scenario.stages)
    count = wanted
    if wanted * passes > MAX_PASSES:
        scenario = replace(scenario, cards=None)
        count = min(wanted, max(MAX_PASSES_WITHOUT_CARDS // passes, 1))
        remark = "The simulation treats every link by itself, as if network cards were not shared"
        remark += "." if count == wanted else f", and it covers only {count} microbatches."
    return ReportSimulation(**vars(simulate(scenario, count)), remark=remark)


def shown_lanes(scenario: Scenario) -> tuple[list[tuple[int, int]], str]:
    """((stage, replica) of every lane, sentence on the workers that are not shown; empty if all are).

    At most `MAX_LANES` workers are shown: the first replicas of every stage, or of evenly spaced stages.
    """
    stages, total = scenario.stages, sum(load.replicas for load in scenario.stages)
    if total <= MAX_LANES:
        return [(i, r) for i, load in enumerate(stages) for r in range(load.replicas)], ""
    if len(stages) > MAX_LANES:
        selected = sorted({round(number * (len(stages) - 1) / (MAX_LANES - 1)) for number in range(MAX_LANES)})
        return [(i, 0) for i in selected], f"Shown are the first workers of {len(selected)} of {len(stages)} stages."
    shown = [1] * len(stages)
    # Add one worker to each stage in turn as long as there is room.
    while True:
        more = [i for i, load in enumerate(stages) if shown[i] < load.replicas][: MAX_LANES - sum(shown)]
        if not more:
            break
        for i in more:
            shown[i] += 1
    places = [(i, r) for i, count in enumerate(shown) for r in range(count)]
    return places, f"Shown are {len(places)} of {total} workers: the first replicas of every stage."


def pipeline_timeline(simulated: ReportSimulation, run: MeasuredRun | None = None) -> PipelineTimeline:
    """The predicted timeline, and the timeline of a run.

    The predicted timeline begins with the first minibatch. The timeline has the number of minibatches that the run
    recorded, or, without a run, a few rounds of the steady state. Raises `InputError` if the run is a run of
    another plan.
    """
    scenario, (shown, omitted) = simulated.scenario, shown_lanes(simulated.scenario)
    began = steady_start(simulated)
    workers = [scenario.stages[stage].workers[replica] for stage, replica in shown]
    end_s = _predicted_end_s(simulated, began, run)
    played = lanes.predicted_lanes(scenario, simulated.replayed, simulated.report.minibatches)
    predicted, complete_s = _intervals(played, shown, end_s)
    end_s = min(end_s, complete_s)
    recorded = lanes.measured_lanes(scenario, run) if run is not None and run.recorded else []
    measured, measured_end_s = _intervals(recorded, shown, math.inf)
    rows = [(worker, stage, scenario.server_of(worker)) for worker, (stage, _) in zip(workers, shown, strict=True)]
    return PipelineTimeline(
        lanes=table_columns(("worker", "stage", "server"), rows),
        end_s=end_s,
        steady=(began, end_s) if began is not None and began < end_s else None,
        predicted=table_columns(_NAMES, predicted),
        measured=table_columns(_NAMES, measured) if measured else None,
        measured_end_s=min(measured_end_s, max(interval[4] for interval in measured)) if measured else None,
        minibatches=sum(1 for time_s in exit_times(scenario, simulated.replayed) if time_s <= end_s),
        omitted=omitted,
    )


def steady_start(simulated: ReportSimulation) -> float | None:
    """Start of the steady state in seconds. From this time on, all rounds of the replicas have the steady step time.

    None if the simulation found no steady state.
    """
    steady = simulated.report.steady
    if steady is None:
        return None
    length = beat(simulated.scenario)
    times = exit_times(simulated.scenario, simulated.replayed)
    ends = [times[count - 1] for count in range(length, steady.last + 1, length)]
    rounds = [
        (start, abs((end - start) / (length * steady.step_time_s) - 1)) for start, end in itertools.pairwise(ends)
    ]
    near = max([STEADY_TOLERANCE, *(STEADY_TOLERANCE_FACTOR * off for start, off in rounds if start >= steady.start_s)])
    settled = [start for start, _ in itertools.takewhile(lambda round_: round_[1] <= near, reversed(rounds))]
    return settled[-1] if settled else None


def _predicted_end_s(simulated: ReportSimulation, began: float | None, run: MeasuredRun | None) -> float:
    """End of the predicted part, in seconds."""
    scenario, steady = simulated.scenario, simulated.report.steady
    recorded = [worker.minibatches for worker in run.recorded.values()] if run is not None else []
    if recorded:
        times = exit_times(scenario, simulated.replayed)
        count = min(*recorded, len(times))
        return times[count - 1] if count else simulated.replayed.end_s
    step_s = scenario.predicted_s if steady is None else steady.step_time_s
    shown = max(MIN_SHOWN_BEATS * beat(scenario), MIN_SHOWN_MINIBATCHES)
    since = simulated.report.fill_s if began is None else began
    return min(since + shown * step_s, simulated.replayed.end_s)


def beat(scenario: Scenario) -> int:
    """The beat: the number of minibatches after which a pipeline's schedule repeats. This is a round of all replicas.

    If such a round is long, the beat is the number of minibatches between two updates, or a round of the replicas of
    the largest stage.
    """
    length = round_length(scenario)
    if length <= MAX_BEAT:
        return length
    return scenario.accumulate or max(stage.replicas for stage in scenario.stages)


def _intervals(
    workers: Sequence[lanes.Lane], shown: Sequence[tuple[int, int]], end_s: float
) -> tuple[list[LaneInterval], float]:
    """The intervals that begin before `end_s`, in order of their start, and the time up to which they are complete.

    At most `MAX_INTERVALS` intervals are returned. Waits are left out.
    """
    number_of: Mapping[tuple[int, int], int] = {place: number for number, place in enumerate(shown)}
    kinds = {kind: number for number, kind in enumerate(INTERVAL_KINDS)}
    intervals: list[LaneInterval] = [
        (number_of[lane.stage, lane.replica], kinds[bar.kind], bar.action.index, bar.start_s, bar.end_s)
        for lane in workers
        if (lane.stage, lane.replica) in number_of
        for bar in lane.bars
        if bar.kind in kinds and bar.start_s < end_s
    ]
    intervals.sort(key=lambda interval: (interval[3], interval[0], interval[1]))
    if len(intervals) <= MAX_INTERVALS:
        return intervals, math.inf
    complete_s = intervals[MAX_INTERVALS][3]
    return [interval for interval in intervals[:MAX_INTERVALS] if interval[3] < complete_s], complete_s
