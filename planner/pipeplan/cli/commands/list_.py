"""`pipeplan list`: the bundled models, the bundled clusters, or the clusters in files."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich import box
from rich.table import Table
from rich.text import Text

from pipeplan.cli.options import bundled_clusters, complete_names, json_option, quiet_option
from pipeplan.cli.output import print_answer, print_json, print_line
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.cluster_toml import bundled_cluster_names, load_cluster
from pipeplan.cluster_data.local import LOCAL, local_cluster
from pipeplan.errors import InputError
from pipeplan.util.units import show_rate, show_size
from pipeplan_launch.job.bundled_models import BUNDLED

MODELS, CLUSTERS = "models", "clusters"


@click.command("list")
@click.argument("kind", type=click.Choice([MODELS, CLUSTERS]), required=False)
@click.argument("files", nargs=-1, metavar="[FILE]...", shell_complete=complete_names(bundled_clusters, ".toml"))
@json_option
@quiet_option
def command(kind: str | None, files: tuple[str, ...], as_json: bool) -> None:
    """List the bundled models, and the bundled clusters with this machine as `local`. With FILEs, list the clusters in
    these files.

    \b
    pipeplan list
    pipeplan list models
    pipeplan list clusters cluster.toml B
    pipeplan list clusters --json
    """
    if files and kind != CLUSTERS:
        raise InputError(f"pipeplan list models takes no file: leave out {files[0]}")
    clusters = [] if kind == MODELS else _clusters(files)
    if as_json:
        documents: dict[str, object] = {MODELS: BUNDLED, CLUSTERS: [cluster.to_json() for cluster in clusters]}
        print_json(documents if kind is None else documents[kind])
        return
    if kind != CLUSTERS:
        print_answer([_model_table(), "\nYour own: path/to/file.py:callable or package.module:callable"])
    if kind is None:
        print_line("")
    if kind != MODELS:
        print_answer([_cluster_table(clusters)])


def _model_table() -> Table:
    table = Table("model", box=None, pad_edge=False)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("microbatch", justify="right", no_wrap=True)
    table.add_column("what it is")
    table.add_column("from")
    for name, model in BUNDLED.items():
        size = f"{model['parameters'] / 1e6:.{1 if model['parameters'] > 1e6 else 2}f} M"
        table.add_row(Text(name), size, str(model["minibatch"]), Text(model["description"]), Text(model["source"]))
    return table


def _clusters(files: Sequence[str]) -> list[Cluster]:
    names = files or (*bundled_cluster_names(), LOCAL)
    return [local_cluster(None) if name == LOCAL else load_cluster(name) for name in names]


def _cluster_table(clusters: Sequence[Cluster]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for heading in ("cluster", "workers", "servers", "memory", "links, innermost first", "per hour"):
        table.add_column(heading, no_wrap=heading.startswith("links"))
    for cluster in clusters:
        table.add_row(*_row(cluster))
    return table


def _row(cluster: Cluster) -> tuple[str, ...]:
    """The cells of a cluster's row. If servers differ, a cell lists their values in server order."""
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
