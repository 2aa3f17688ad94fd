"""Plots samples per second against workers, beside the ideal rate if all workers computed all the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.drawing.tables import describe_cluster
from pipeplan.rendering import templates
from pipeplan.sweeps.rows import SweepRow, varying_settings
from pipeplan.util.text import one_line

WIDTH, HEIGHT = 560.0, 300.0
"""Size of the drawing without its labels, in pixels."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""The palette of Okabe and Ito, which people with any colour vision can tell apart."""


@dataclass(frozen=True)
class ScalingSeries:
    """The points of a sweep that differ only in the number of workers."""

    name: str
    points: tuple[tuple[int, float], ...]
    """Pairs of workers and samples per second, sorted by workers."""


@dataclass(frozen=True)
class ScalingChart:
    """The data of a plot."""

    series: tuple[ScalingSeries, ...]
    ideal: tuple[tuple[int, float], ...]
    servers: tuple[tuple[int, str], ...]
    """For each number of workers the servers that have them, in words."""
    left_out: int = 0
    """Number of series that are not drawn, because there are too few colours."""

    @property
    def most_workers(self) -> int:
        """The right end of the plot."""
        return max(workers for workers, _ in self.ideal)

    @property
    def fastest(self) -> float:
        """The upper end of the plot, in samples per second."""
        return max(rate for _, rate in self.ideal)


def scaling_chart(rows: Sequence[SweepRow]) -> ScalingChart | None:
    """The chart of the rows; None unless there are plans for at least two numbers of workers."""
    solved = [row for row in rows if row.rate is not None]
    if len({row.point.cluster.workers for row in solved}) < 2:
        return None
    names = [name for name in varying_settings(rows) if name not in ("servers", "workers")]
    groups: dict[str, dict[int, float]] = {}
    for row in solved:
        settings = row.point.settings()
        key = ", ".join(f"{name} {settings.get(name, '-')}" for name in names) or "best plan"
        line = groups.setdefault(key, {})
        workers = row.point.cluster.workers
        line[workers] = max(line.get(workers, 0.0), row.rate or 0.0)
    series = [ScalingSeries(one_line(name), tuple(sorted(line.items()))) for name, line in groups.items()]
    ideal = {row.point.cluster.workers: row.point.ideal_rate for row in rows}
    return ScalingChart(
        tuple(series[: len(COLOURS)]),
        tuple(sorted(ideal.items())),
        _servers(rows),
        max(0, len(series) - len(COLOURS)),
    )


def _servers(rows: Sequence[SweepRow]) -> tuple[tuple[int, str], ...]:
    """The servers of the rows with each number of workers; rows may have so many on different servers."""
    found: dict[int, dict[str, None]] = {}
    for row in rows:
        found.setdefault(row.point.cluster.workers, {})[describe_cluster(row.point.cluster)] = None
    return tuple((workers, " or ".join(texts)) for workers, texts in sorted(found.items()))


def rounded_figure(value: float) -> str:
    """A number of samples or a price, rounded to four digits or to an integer."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def axis_ticks(most: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers from 0 to about `most`, for the ticks of an axis."""
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * index for index in range(math.floor(most / step * (1 + 1e-9)) + 1)]


def scaling_svg(rows: Sequence[SweepRow], title: str) -> str | None:
    """The chart as a self-contained SVG file; None if there is nothing to draw."""
    chart = scaling_chart(rows)
    if chart is None:
        return None
    names = {workers: one_line(f"{workers} workers, {text}") for workers, text in chart.servers}

    def place(workers: float, rate: float) -> str:
        return f"{workers / chart.most_workers * WIDTH:.1f},{HEIGHT - rate / chart.fastest * HEIGHT:.1f}"

    return templates.load_template("scaling.svg.j2").render(
        title=one_line(title),
        width=WIDTH,
        height=HEIGHT,
        ideal=" ".join(place(workers, rate) for workers, rate in ((0, 0.0), *chart.ideal)),
        series=[
            {
                "name": series.name,
                "colour": COLOURS[index],
                "line": " ".join(place(*point) for point in series.points),
                "dots": [
                    (*place(*point).split(","), f"{names[point[0]]}: {rounded_figure(point[1])} samples/s")
                    for point in series.points
                ],
            }
            for index, series in enumerate(chart.series)
        ],
        left_out=chart.left_out,
        rates=[
            (rounded_figure(rate), f"{HEIGHT - rate / chart.fastest * HEIGHT:.1f}")
            for rate in axis_ticks(chart.fastest)
        ],
        workers=[(str(workers), f"{workers / chart.most_workers * WIDTH:.1f}") for workers, _ in chart.ideal],
    )
