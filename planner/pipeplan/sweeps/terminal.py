"""The table that `pipeplan sweep` prints, within 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.text import Text

from pipeplan.drawing.tables import FittingTable, describe_cluster, short_config
from pipeplan.sweeps.rows import SweepRow, pareto_rows, varying_settings
from pipeplan.util.text import one_line
from pipeplan.util.units import show_time

LONGEST_CONFIG = 14
MANY = 5
"""At this number of setting columns or more, a column is left out if its values follow from other columns."""
PARETO = "*"
EXPENDABLE = ("proven\nby", "a micro-\nbatch", "over\nDP", "plan")
"""Columns that are left out if a terminal is too narrow, in this order."""


def sweep_table(rows: Sequence[SweepRow]) -> Iterator[RenderableType]:
    """A heading with the settings that all rows share, the table, and notes on it. The lines may be wrapped."""
    if not rows:
        yield "No point was solved."
        return
    first, names = rows[0], _shown(rows)
    settings = first.point.settings().items()
    fixed = [f"{name} {value}" for name, value in settings if name not in varying_settings(rows)]
    if "workers" in varying_settings(rows) and "workers" not in names:
        each = first.point.cluster.workers // first.point.cluster.servers
        fixed.insert(0, f"{each} worker{'s' * (each > 1)} a server")
    model, cluster = one_line(first.point.profile.model_name), first.point.cluster.name
    yield Text.assemble((f"{model} on cluster {cluster}", "bold"), f" ({', '.join(fixed)})")
    yield _table(rows, names)
    yield from _notes(rows)


def _notes(rows: Sequence[SweepRow]) -> Iterator[str]:
    if any(not row.point.cluster.uniform for row in rows):
        for text, points in _points_by_cluster(rows).items():
            yield f"Point{'s' * (len(points) > 1)} {', '.join(map(str, points))}: {text}."
    for number, row in enumerate(rows, start=1):
        if row.answer.why:
            yield f"Point {number}: {one_line(row.answer.why)}"
    solved = {row.answer.proven for row in rows if not row.answer.why}
    if len(solved) == 1:
        proven = solved.pop()
        gap = f"at most {proven.removeprefix('gap ')} behind the best"
        yield f"Every plan: {gap if 'gap' in proven else f'optimal by {proven}'}."
    yield from _choices(rows)
    if not all(row.answer.parallelism_fits for row in rows):
        yield "(…) data parallelism does not fit in memory there."
    if any(row.cost is not None for row in rows):
        yield f"{PARETO} no other point is both as fast and as cheap. Idle servers are paid for."


def _choices(rows: Sequence[SweepRow]) -> Iterator[str]:
    """Lines on the points whose plans are asynchronous, or have other microbatches than the point."""
    stale = {number: row.answer.schedule for number, row in enumerate(rows, start=1) if not row.answer.synchronous}
    if stale:
        numbers, schedules = ", ".join(map(str, stale)), ", ".join(sorted(set(stale.values())))
        yield f"Point{'s' * (len(stale) > 1)} {numbers}: asynchronous ({schedules}), so that gradients are stale."
    for number, row in enumerate(rows, start=1):
        if row.minibatch != (row.point.microbatch or row.point.profile.minibatch):
            yield f"Point {number}: the plan has microbatches of {row.minibatch}."


def _points_by_cluster(rows: Sequence[SweepRow]) -> dict[str, list[int]]:
    """The numbers of the points, by a description of their servers."""
    points: dict[str, list[int]] = {}
    for number, row in enumerate(rows, start=1):
        points.setdefault(describe_cluster(row.point.cluster), []).append(number)
    return points


def _shown(rows: Sequence[SweepRow]) -> list[str]:
    """The settings that get a column: all varying settings, except the workers if the servers determine them."""
    names = varying_settings(rows)
    clusters = [row.point.cluster for row in rows]
    if (
        len({(cluster.workers / cluster.servers, cluster.workers % cluster.servers) for cluster in clusters}) == 1
        and "servers" in names
    ):
        names.remove("workers")
    return names


def _table(rows: Sequence[SweepRow], names: list[str]) -> FittingTable:
    table = FittingTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, expendable=EXPENDABLE)
    columns = _columns(rows, names)
    for heading, _ in columns:
        table.add_column(heading, justify="left" if heading == "plan" else "right", no_wrap=heading != "plan")
        if heading == "plan" and len(names) <= MANY:
            table.columns[-1].min_width = min(LONGEST_CONFIG, max(len(_config(row)) for row in rows))
    for number in range(len(rows)):
        table.add_row(*(cells[number] for _, cells in columns))
    return table


def _columns(rows: Sequence[SweepRow], names: list[str]) -> list[tuple[str, list[Text]]]:
    """Headings with the cells below them. From `MANY` settings on, columns that follow from others are left out."""
    best = pareto_rows(rows)
    step_times = [show_time(row.answer.step_time_s) if row.answer.step_time_s is not None else "-" for row in rows]
    columns = [("", [str(number + 1) for number in range(len(rows))])]
    columns += [_setting(name, [row.point.settings().get(name, "") for row in rows]) for name in names]
    if len(names) < MANY:
        columns.append(("a micro-\nbatch", step_times))
    columns.append(("samples\n/s", [rounded_figure(row.rate) if row.rate is not None else "-" for row in rows]))
    if len(names) < MANY:
        columns.append(("over\nDP", [_gain(row) for row in rows]))
    columns.append(("plan", [_config(row) for row in rows]))
    if len({row.answer.proven for row in rows if not row.answer.why}) > 1:
        columns.append(("proven\nby", [row.answer.proven for row in rows]))
    if any(row.cost is not None for row in rows):
        costs = ["-" if row.cost is None else rounded_figure(row.cost) for row in rows]
        stars = [PARETO if number in best else " " for number in range(len(rows))]
        columns.append(("cost a\nmillion  ", [f"{cost} {star}" for cost, star in zip(costs, stars, strict=True)]))
    return [(heading, [Text(cell) for cell in cells]) for heading, cells in columns]


def _setting(name: str, cells: list[str]) -> tuple[str, list[str]]:
    """The column of a setting. A unit that all cells share is moved to the heading."""
    short = {"minibatch": "micro-\nbatch", "servers": "ser-\nvers", "workers": "work-\ners"}
    pairs = [cell.partition(" ") for cell in cells]
    units = {unit for _, _, unit in pairs}
    if len(units) != 1 or units == {""}:
        return short.get(name, name.replace(" ", "\n")), cells
    return f"{name.removesuffix(' links')}\n{units.pop()}", [number for number, _, _ in pairs]


def _gain(row: SweepRow) -> str:
    if row.answer.over_parallelism is None:
        return "-"
    gain = f"{row.answer.over_parallelism:.2f}x"
    return gain if row.answer.parallelism_fits else f"({gain})"


def _config(row: SweepRow) -> str:
    return short_config(row.answer.config or "none", LONGEST_CONFIG)


def rounded_figure(value: float) -> str:
    """A number of samples or a price, rounded to four digits or to an integer."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"
