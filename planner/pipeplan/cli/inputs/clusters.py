"""`pipeplan clusters`: list the bundled clusters, or those in cluster files."""

from __future__ import annotations

import click
from rich import box
from rich.table import Table

from pipeplan.cli.shared.options import bundled_clusters, complete_names, json_option, quiet_option
from pipeplan.cli.shared.output import print_answer, print_json
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.cluster_toml import bundled_cluster_names, load_cluster
from pipeplan.cluster_data.local import LOCAL, local_cluster
from pipeplan.util.units import show_rate, show_size


@click.command("clusters")
@click.argument("files", nargs=-1, metavar="[FILE]...", shell_complete=complete_names(bundled_clusters, ".toml"))
@json_option
@quiet_option
def command(files: tuple[str, ...], as_json: bool) -> None:
    """List the bundled clusters and this machine as the cluster `local`; or, given FILEs, the clusters in those.

    \b
    pipeplan clusters
    pipeplan clusters cluster.toml B
    pipeplan clusters --json
    """
    clusters = [
        local_cluster(None) if name == LOCAL else load_cluster(name)
        for name in files or (*bundled_cluster_names(), LOCAL)
    ]
    if as_json:
        print_json([cluster.to_json() for cluster in clusters])
        return
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for heading in ("name", "workers", "servers", "memory", "links, innermost first", "per hour"):
        table.add_column(heading, no_wrap=heading.startswith("links"))
    for cluster in clusters:
        table.add_row(*_row(cluster))
    print_answer([table])


def _row(cluster: Cluster) -> tuple[str, ...]:
    """The cells of a cluster. A heterogeneous one has several counts and rates for a level, listed in server order."""
    servers = "\n".join(f"{count} × {devices} {name}" for count, devices, name in cluster.kinds)
    memory = "\n".join(dict.fromkeys(show_size(device.memory_bytes) for device in cluster.devices))
    price = "" if cluster.price_per_hour is None else f"{cluster.price_per_hour:.2f}"
    return cluster.name, str(cluster.workers), servers, memory, "\n".join(_links(cluster)), price


def _links(cluster: Cluster) -> list[str]:
    inner, *outer = cluster.levels
    insides = [machine.inside for machine in cluster.machines] or [inner]
    texts = []
    if inner.count > 1:
        counts = " / ".join(dict.fromkeys(str(level.count) for level in insides))
        rates = _rates([level.bandwidth for level in insides if level.count > 1])
        texts.append(f"{counts} a {inner.name} at {rates}")
    for number, level in enumerate(outer):
        own = [machine.card for machine in cluster.machines] if number == 0 else []
        cards = [min(rate for rate in (card, level.bandwidth) if rate) for card in own] or [level.bandwidth]
        texts += [f"{level.count} a {level.name} at {_rates(cards)}"] if level.count > 1 else []
    return texts


def _rates(rates: list[float]) -> str:
    """Distinct rates with one unit: `96 Gbit/s`, or `96 / 48 Gbit/s`."""
    unit = " Gbit/s"
    return " / ".join(dict.fromkeys(show_rate(rate).removesuffix(unit) for rate in rates)) + unit
