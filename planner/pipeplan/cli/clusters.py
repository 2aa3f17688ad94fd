"""`pipeplan clusters`: what comes bundled."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from pipeplan.cluster_file import bundled_names, load
from pipeplan.local import local
from pipeplan.units import show_rate, show_size


@click.command("clusters")
def command() -> None:
    """List the bundled clusters, and what this machine looks like as `local`."""
    table = Table(title="Clusters", title_justify="left")
    for heading in ("name", "workers", "device", "memory", "links, innermost first"):
        table.add_column(heading)
    for cluster in [*(load(name) for name in bundled_names()), local(None)]:
        links = ", ".join(
            f"{lv.count} a {lv.name} at {show_rate(lv.bandwidth)}" for lv in cluster.levels if lv.count > 1
        )
        device = cluster.device
        table.add_row(cluster.name, str(cluster.workers), device.name, show_size(device.memory_bytes), links)
    Console().print(table)
