"""The rows of a sweep as a table, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan.sweep import plot
from pipeplan.sweep.rows import Row, efficient, varying
from pipeplan.text import one_line
from pipeplan.units import show_time

LONGEST_CONFIG = 14
PARETO = "*"


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table, what is not in it, and the scaling plot where workers vary."""
    if not rows:
        console.print("No point was solved.")
        return
    first = rows[0]
    names = varying(rows)
    fixed = ", ".join(f"{name} {value}" for name, value in first.point.settings().items() if name not in names)
    model, cluster = one_line(first.point.profile.model_name), first.point.cluster.name
    console.print(Text(f"{model} on cluster {cluster}", "bold"), f"({fixed})")
    console.print(_table(rows, names))
    for number, row in enumerate(rows, start=1):
        if row.answer.why:
            console.print(f"Point {number}: {one_line(row.answer.why)}", markup=False)
    if not all(row.answer.parallelism_fits for row in rows):
        console.print("(…) data parallelism does not fit in memory there.")
    if any(row.cost is not None for row in rows):
        console.print(f"{PARETO} no other point is both as fast and as cheap. Idle servers are paid for.")
    drawn = plot.scaling(rows)
    if drawn:
        console.print()
        for line in drawn:
            console.print(line, soft_wrap=True, markup=False)


def _table(rows: Sequence[Row], names: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    priced = any(row.cost is not None for row in rows)
    for heading in ("", *(_heading(name) for name in names), "mini-\nbatch", "samples\n/s", "over\nDP"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    table.add_column("proven\nby", no_wrap=True)
    if priced:
        table.add_column("a million\nsamples", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
    best = efficient(rows)
    for number, row in enumerate(rows):
        table.add_row(str(number + 1), *_cells(row, names), *(_cost(row, number in best) if priced else ()))
    return table


def _heading(name: str) -> str:
    """`cluster links` over two lines."""
    return {"minibatch": "mini-\nbatch of", "servers": "ser-\nvers", "workers": "work-\ners"}.get(
        name, name.replace(" ", "\n")
    )


def _cells(row: Row, names: list[str]) -> list[Text]:
    settings, answer = row.point.settings(), row.answer
    cells = [settings.get(name, "") for name in names]
    if answer.pace_s is None or row.rate is None:
        return [Text(cell) for cell in (*cells, "-", "-", "-", "none", "")]
    gain = "-" if answer.over_parallelism is None else f"{answer.over_parallelism:.2f}x"
    gain = gain if answer.parallelism_fits else f"({gain})"
    config = answer.config
    if len(config) > LONGEST_CONFIG:
        config = f"{config.count('-') + 1} stages"
    return [
        Text(cell) for cell in (*cells, show_time(answer.pace_s), plot.figure(row.rate), gain, config, answer.proven)
    ]


def _cost(row: Row, best: bool) -> tuple[str, str]:
    return ("-" if row.cost is None else plot.figure(row.cost), PARETO if best else "")
