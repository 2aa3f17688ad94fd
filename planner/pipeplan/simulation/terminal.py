"""Prints a simulation: a timeline of the workers, and the summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.simulation import lanes
from pipeplan.simulation.events import SimulatedEvents
from pipeplan.simulation.lanes import Lane
from pipeplan.simulation.message_order import GLOO
from pipeplan.simulation.metrics import SimulationReport
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.units import show_size, show_time
from pipeplan_launch.plan.schedule import ActionKind

DRAWN_PASSES = 3
"""Number of forward and backward passes of the slowest stage that are drawn after the fill."""


def print_simulation(
    scenario: Scenario,
    replayed: SimulatedEvents,
    report: SimulationReport,
    console: Console,
    width: int,
    run: MeasuredRun | None = None,
) -> None:
    """Print a simulation, and below its timeline that of a run of the plan, if given.

    Raises an `InputError` where the run recorded no timelines.
    """
    run_lanes = lanes.measured_lanes(scenario, run) if run is not None else []
    console.print(_headline(report))
    if run is not None:
        console.print(_measured_line(run, report))
    for line in draw_timeline(scenario, replayed, report, width, run_lanes):
        console.print(line, soft_wrap=True)
    weights = "  W+ weights" if any(load.deferred for load in scenario.stages) else ""
    console.print(f"F- forward  B= backward{weights}  ~ in an all-reduce  . waiting  (w worker, s stage)", style="dim")
    console.print(_table(report))
    busy = [f"{row} {share:.0%}" for row, share in report.links.items()]
    if busy:
        console.print("Links busy: " + ", ".join(busy))


def _headline(report: SimulationReport) -> Text:
    text = Text.assemble(
        (f"Plan {report.scenario.config}", "bold"),
        f", {report.minibatches} microbatches replayed in {show_time(report.total_s)}: ",
    )
    if report.steady is None:
        text.append("too few for a steady state, give more with --microbatches.")
    elif report.ratio is None:
        text.append(f"{show_time(report.steady.step_time_s)} each in the steady state.")
    else:
        text.append(f"{show_time(report.steady.step_time_s)} each", "bold")
        text.append(
            f" in the steady state, {report.ratio:.3f} of the predicted {show_time(report.scenario.predicted_s)}."
        )
    plan = report.scenario
    text.append(f"\nFill {show_time(report.fill_s)}, drain {show_time(report.drain_s)}. Schedule {plan.schedule.name}")
    text.append("." if plan.accumulate is None else f", an update for every {plan.accumulate} microbatches.")
    return text.append("" if plan.transport == GLOO else f" Messages in the order of --transport {plan.transport}.")


def _measured_line(run: MeasuredRun, report: SimulationReport) -> Text:
    """The step time that a run measured, and its ratio to the prediction."""
    step_time_s = run.summary.minibatch_s.measured
    text = Text("Measured")
    if step_time_s is None:
        text.append(": too few microbatches for a step time")
    else:
        text.append(f": {show_time(step_time_s)} each", "bold")
        if report.scenario.predicted_s > 0:
            text.append(f", {step_time_s / report.scenario.predicted_s:.3f} of the prediction")
    return text.append(f". Run {run.folder}, epoch {next(iter(run.recorded.values())).epoch + 1}")


def draw_timeline(
    scenario: Scenario, replayed: SimulatedEvents, report: SimulationReport, width: int, run: Sequence[Lane] = ()
) -> list[Text]:
    """The timeline of the beginning of a simulation, one row of at most `width` columns for each worker.

    The lanes of a `run` follow below on the same time scale. Both are then as long as the slower of the two needs for
    the passes that the simulation shows.
    """
    marks: dict[tuple[int, int], list[lanes.Mark]] = {}
    for stage, replica, action, start_s, end_s in replayed.passes:
        worker = scenario.stages[stage].workers[replica]
        marks.setdefault((worker, stage), []).append(lanes.Mark(action, start_s, end_s))
    predicted = _labelled((*place, played) for place, played in marks.items())
    measured = _labelled((lane.worker, lane.stage, lanes.recorded_marks(lane)) for lane in run)
    slowest = max(stage.forward_s + stage.backward_s for stage in scenario.stages)
    span = min(report.fill_s + DRAWN_PASSES * slowest, report.total_s)
    if measured:
        span = max(span, _catch_up_s(scenario, predicted, measured, span))
    lines = list(lanes.draw_rows(predicted, span, width))
    if measured:
        lines = [Text("predicted", "bold"), *lines, Text("measured", "bold"), *lanes.draw_rows(measured, span, width)]
    margin = max(len(label) for label, _ in predicted)
    scale = f"0{show_time(span):>{lanes.time_cells(width, margin) - 1}}"
    return [*lines, Text(" " * margin + scale, "dim")]


Labelled = list[tuple[str, list[lanes.Mark]]]


def _labelled(workers: Iterable[tuple[int, int, list[lanes.Mark]]]) -> Labelled:
    return [
        (f"w{worker} s{stage + 1} ", marks) for worker, stage, marks in sorted(workers, key=lambda entry: entry[:2])
    ]


def _catch_up_s(scenario: Scenario, predicted: Labelled, measured: Labelled, span_s: float) -> float:
    """The time at which the run had finished as many passes, of all workers together, as the simulation by `span_s`."""
    kind = ActionKind.BACKWARD if scenario.schedule.trains else ActionKind.FORWARD

    def ends(workers: Labelled) -> list[float]:
        return sorted(mark.end_s for _, marks in workers for mark in marks if mark.action.kind is kind)

    finished, measured_ends = sum(end <= span_s for end in ends(predicted)), ends(measured)
    return measured_ends[min(finished, len(measured_ends)) - 1] if finished and measured_ends else span_s


def _table(report: SimulationReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for heading in ("stage", "repl.", "computing", "in sync", "waiting", "depth", "peak", "held", "memory", "planned"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, stage in enumerate(report.stages, start=1):
        waiting = max(0.0, 1.0 - stage.computing - stage.synchronising)
        table.add_row(
            str(number),
            str(stage.replicas),
            f"{stage.computing:.0%}",
            f"{stage.synchronising:.0%}",
            f"{waiting:.0%}",
            str(stage.depth),
            str(stage.peak_in_flight),
            show_size(stage.held_bytes),
            show_size(stage.peak_bytes),
            show_size(stage.memory_bytes),
        )
    return table
