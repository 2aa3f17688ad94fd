"""The table of measured links that `pipeplan profile --links` prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table

from pipeplan.link_fit.alpha_beta import AlphaBetaFit
from pipeplan.link_fit.to_cluster import ClusterFromLinks, MeasuredLink
from pipeplan.util.units import show_size, show_time

_HEADINGS = ("level", "joins", "link\nGbit/s", "latency", "message\nGbit/s", "±", "all-reduce\nGbit/s", "±", "sizes")


def links_table(built: ClusterFromLinks) -> Iterator[RenderableType]:
    """A table with a row for every level: the fitted figures, and the error of the fit."""
    cluster = built.cluster
    kinds = ", ".join(f"{count} × {devices} {name}" for count, devices, name in cluster.kinds)
    yield f"{cluster.name}: {kinds}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if number in (0, 8) else "right", no_wrap=True)
    for level, link in zip(cluster.levels, built.links, strict=False):
        if link is not None:
            table.add_row(level.name, str(level.count), *_row(link))
    yield table
    yield "± is the median difference between a time and what latency and bandwidth give for it."


def _row(link: MeasuredLink) -> list[str]:
    sizes = [size for one in link.series for size, _ in one.samples]
    return [
        _gbit(link.bandwidth),
        show_time(link.latency_s),
        *_fitted(link.message),
        *_fitted(link.ring),
        f"{show_size(min(sizes))} - {show_size(max(sizes))}",
    ]


def _fitted(fit: AlphaBetaFit) -> tuple[str, str]:
    return _gbit(fit.bandwidth), f"{fit.error:.0%}"


def _gbit(rate: float) -> str:
    return f"{rate * 8 / 1e9:.3g}"
