"""Prints a simulation: a timeline of the workers, and the summary.

`pipeplan report` draws a simulation next to a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipeplan.simulation.events import Pass
from pipeplan.simulation.metrics import SimulationReport
from pipeplan.simulation.simulate import Simulated
from pipeplan.util.units import show_size, show_time
from pipeplan_launch.plan.schedule import ActionKind

DRAWN_PASSES = 3
"""Number of forward and backward passes of the slowest stage that are drawn after the fill."""
MOST_ROWS = 32
"""Largest number of workers that are drawn."""
# After the number of a pass come dashes for forward or double dashes for backward, so that no colours are needed.
_LOOKS = {
    ActionKind.FORWARD: ("-", "cyan"),
    ActionKind.BACKWARD: ("=", "magenta"),
    ActionKind.WEIGHTS: ("+", "blue"),
    ActionKind.UPDATE: ("~", "yellow"),
}


def simulation_parts(simulated: Simulated, width: int) -> Iterator[RenderableType]:
    """A simulation as lines and a table. The timeline has at most `width` columns."""
    report = simulated.report
    yield _headline(report)
    yield from draw_timeline(simulated, width)
    weights = "  W+ weights" if any(load.deferred for load in simulated.scenario.stages) else ""
    yield Text(f"F- forward  B= backward{weights}  ~ in an all-reduce  . waiting  (w worker, s stage)", "dim")
    yield _table(report)
    busy = [f"{row} {share:.0%}" for row, share in report.links.items()]
    if busy:
        yield "Links busy: " + ", ".join(busy)


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
    return text.append("." if plan.accumulate is None else f", an update for every {plan.accumulate} microbatches.")


def draw_timeline(simulated: Simulated, width: int) -> Iterator[Text]:
    """The timeline of the beginning of a simulation: one row of at most `width` columns for each worker."""
    scenario, report = simulated.scenario, simulated.report
    played: dict[tuple[int, int], list[Pass]] = {}
    for done in simulated.replayed.passes:
        played.setdefault((scenario.stages[done.stage].workers[done.replica], done.stage), []).append(done)
    rows = [(f"w{worker} s{stage + 1} ", passes) for (worker, stage), passes in sorted(played.items())]
    slowest = max(stage.forward_s + stage.backward_s for stage in scenario.stages)
    span_s = min(report.fill_s + DRAWN_PASSES * slowest, report.total_s)
    margin = max(len(label) for label, _ in rows)
    cells = max(width - margin, 10)
    for label, passes in rows[:MOST_ROWS]:
        yield Text().append(label.ljust(margin), "dim").append_text(_row(passes, span_s, cells))
    if len(rows) > MOST_ROWS:
        yield Text(f"… {len(rows)} workers in all", "dim")
    yield Text(" " * margin + f"0{show_time(span_s):>{cells - 1}}", "dim")


def _row(passes: Sequence[Pass], span_s: float, cells: int) -> Text:
    """The row of one worker; idle time is drawn as dots."""

    def cell(time_s: float) -> int:
        return min(cells, round(time_s / span_s * cells)) if span_s > 0 else 0

    row, drawn = Text(), 0
    for done in passes:
        if done.start_s >= span_s:
            break
        # Every pass gets at least one cell, unless another short pass already has that cell.
        first = max(drawn, cell(done.start_s))
        last = min(cells, max(cell(done.start_s) + 1, cell(done.end_s)))
        if last <= first:
            continue
        row.append("." * (first - drawn), "dim")
        label, (fill, style) = str(done.action), _LOOKS[done.action.kind]
        # A number that does not fit is left out, because its first digits would read as another number.
        shown = label if len(label) <= last - first else done.action.kind.value
        row.append(shown.ljust(last - first, fill), style)
        drawn = last
    return row.append("." * (cells - drawn), "dim")


def _table(report: SimulationReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for heading in ("stage", "repl.", "computing", "in sync", "waiting", "depth", "peak", "held", "memory", "planned"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, stage in enumerate(report.stages, start=1):
        waiting = max(0.0, 1.0 - stage.computing - stage.synchronising)
        shares = (f"{share:.0%}" for share in (stage.computing, stage.synchronising, waiting))
        sizes = map(show_size, (stage.held_bytes, stage.peak_bytes, stage.memory_bytes))
        table.add_row(str(number), str(stage.replicas), *shares, str(stage.depth), str(stage.peak_in_flight), *sizes)
    return table
