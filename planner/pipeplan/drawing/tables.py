"""Tables and words that several answers share: a plan's stages, its servers, a cluster and a configuration in short."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import Evaluation
from pipeplan.plan.plan import Plan
from pipeplan.problem.problem import Problem
from pipeplan.util.text import number_ranges, one_line
from pipeplan.util.units import show_size, show_time

EXPENDABLE = ("link", "to next", "servers", "sync", "depth")
"""Columns of the table of stages that are left out if the terminal is too narrow, in this order."""


class FittingTable(Table):
    """A table whose columns with the headings `expendable` may be left out, in this order."""

    def __init__(self, *, expendable: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self.expendable = tuple(expendable)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, and below it a line that names the columns that were left out."""
        shown, left_out = copy.copy(self), []
        unlimited = options.update(max_width=10_000)
        for heading in self.expendable:
            if Table.__rich_measure__(shown, console, unlimited).maximum <= options.max_width:
                break
            kept = [column for column in shown.columns if column.header != heading]
            if len(kept) < len(shown.columns):
                shown.columns = kept
                left_out.append(" ".join(str(heading).replace("-\n", "").split()))
        yield from Table.__rich_console__(shown, console, options)
        if left_out:
            yield Text(f"Not shown in {options.max_width} columns: {', '.join(left_out)}.", "dim")


def stage_table(plan: Plan, score: Evaluation, problem: Problem) -> FittingTable:
    """A row for every stage: replicas, servers, depth, times, messages and memory."""
    table = FittingTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, expendable=EXPENDABLE)
    limited = problem.options.memory
    least = min(cost.capacity_bytes for cost in score.stages)
    # In a heterogeneous cluster, the column shows shares of each stage's own capacity.
    differ = any(cost.capacity_bytes > least for cost in score.stages)
    capacity = "" if not limited else "of its device" if differ else f"of {show_size(least)}"
    for heading in ("stage", "repl.", "servers", "depth", "compute", "sync", "to next", "link", "memory", capacity):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, (stage, cost) in enumerate(zip(plan.stages, score.stages, strict=True), start=1):
        last = number == len(plan.stages)
        recomputed = "*" if stage.recompute else ""
        share = f"{cost.memory_bytes / cost.capacity_bytes:.0%}" if limited else ""
        table.add_row(
            str(number),
            str(stage.replicas),
            server_numbers(stage.workers, problem.cluster),
            str(stage.depth),
            show_time(cost.compute_s) + recomputed,
            show_time(cost.synchronisation_s),
            "" if last else show_size(cost.boundary_bytes),
            "" if last else show_time(cost.boundary_s),
            show_size(cost.memory_bytes),
            Text(share, style="red" if cost.memory_bytes > cost.capacity_bytes else ""),
        )
    return table


def server_numbers(workers: Iterable[int], cluster: Cluster) -> str:
    """The indices of the servers of these workers, as text such as `0-2` or `0,3`."""
    return number_ranges({cluster.server_of(worker) for worker in workers})


def describe_cluster(cluster: Cluster) -> str:
    """A cluster in a few words: `2 servers × 8 V100 16 GB`, or `3 servers: 2 × 8 V100 16 GB + 4 T4`."""
    (first, devices, name), *others = cluster.kinds
    if others:
        counted = [f"{'' if count == 1 else f'{count} × '}{devices} {name}" for count, devices, name in cluster.kinds]
        return one_line(f"{cluster.servers} servers: {' + '.join(counted)}")
    return one_line(f"{devices} {name}" if first == 1 else f"{first} servers × {devices} {name}")


def short_config(config: str, most: int) -> str:
    """The configuration, or the number of its stages if it is longer than `most` characters."""
    return config if len(config) <= most else f"{config.count('-') + 1} stages"
