"""A replay as people read it: a timeline of the workers, and what was measured."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan.simulate.engine import Pass, Replayed
from pipeplan.simulate.report import Report
from pipeplan.simulate.scenario import Scenario
from pipeplan.units import show_size, show_time
from pipeplan_launch.schedule import Kind

MOST_ROWS = 32
ROUNDS = 3  # of the slowest replica's forward and backward pass, drawn after the fill
_STYLES = {Kind.FORWARD: "cyan", Kind.BACKWARD: "magenta", Kind.UPDATE: "yellow"}
# Past its number a forward pass goes on as dashes, a backward pass as double ones: that can be told without colours.
_FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.UPDATE: "~"}


def show(scenario: Scenario, replayed: Replayed, report: Report, console: Console, width: int) -> None:
    """Print a replay."""
    console.print(_headline(report))
    for line in timeline(scenario, replayed, report, width):
        console.print(line, soft_wrap=True)
    console.print("F- forward  B= backward  ~ in an all-reduce  . waiting  (w worker, s stage)", style="dim")
    console.print(_table(report))
    busy = [f"{row} {share:.0%}" for row, share in report.links.items()]
    if busy:
        console.print("Links busy: " + ", ".join(busy))


def _headline(report: Report) -> Text:
    text = Text.assemble(
        (f"Plan {report.config}", "bold"), f", {report.minibatches} minibatches replayed in {_long(report.total_s)}: "
    )
    if report.steady is None:
        text.append("too few for a steady state, give more with --minibatches.")
    elif report.ratio is None:
        text.append(f"{show_time(report.steady.pace_s)} each in the steady state.")
    else:
        text.append(f"{show_time(report.steady.pace_s)} each", "bold")
        text.append(f" in the steady state, {report.ratio:.3f} of the predicted {show_time(report.predicted_s)}.")
    text.append(f"\nFill {_long(report.fill_s)}, drain {_long(report.drain_s)}. Schedule {report.schedule}")
    return text.append("." if report.accumulate is None else f", an update for every {report.accumulate} minibatches.")


def _long(seconds: float) -> str:
    return show_time(seconds) if seconds < 10 else f"{seconds:.1f} s"


def timeline(scenario: Scenario, replayed: Replayed, report: Report, width: int) -> list[Text]:
    """The beginning of a replay, a row for every worker, each at most `width` columns."""
    workers = sorted(
        (worker, stage, replica)
        for stage, load in enumerate(scenario.stages)
        for replica, worker in enumerate(load.workers)
    )
    labels = [f"w{worker} s{stage + 1} " for worker, stage, _ in workers[:MOST_ROWS]]
    margin = max(map(len, labels))
    cells = max(width - margin, 10)
    slowest = max(stage.forward_s + stage.backward_s for stage in scenario.stages)
    span = min(report.fill_s + ROUNDS * slowest, report.total_s)
    lines = []
    for label, (_, stage, replica) in zip(labels, workers, strict=False):
        mine = [done for done in replayed.passes if done.stage == stage and done.replica == replica]
        lines.append(Text().append(label.ljust(margin), "dim").append_text(_row(mine, span, cells)))
    if len(workers) > MOST_ROWS:
        lines.append(Text(f"… {len(workers)} workers in all", "dim"))
    scale = f"0{show_time(span):>{cells - 1}}"
    return [*lines, Text(" " * margin + scale, "dim")]


def _row(passes: list[Pass], span: float, cells: int) -> Text:
    """One worker's passes, from left to right, idle time as dots."""
    row, drawn = Text(), 0
    for _, _, action, start, end in passes:
        if start >= span:
            break
        # At least one cell, unless another short pass has it already.
        first = max(drawn, _cell(start, span, cells))
        last = min(cells, max(_cell(start, span, cells) + 1, _cell(end, span, cells)))
        if last <= first:
            continue
        row.append("." * (first - drawn), "dim")
        label = str(action)
        # A number that is cut off would be another number.
        shown = label if len(label) <= last - first else action.kind.value
        row.append(shown.ljust(last - first, _FILL[action.kind]), _STYLES[action.kind])
        drawn = last
    return row.append("." * (cells - drawn), "dim")


def _cell(time_s: float, span: float, cells: int) -> int:
    return min(cells, round(time_s / span * cells)) if span > 0 else 0


def _table(report: Report) -> Table:
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
