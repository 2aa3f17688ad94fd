"""`pipeplan profile --links`: measure the links between workers, print them as a table, and write a cluster file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import click
from rich import box
from rich.console import RenderableType
from rich.table import Table

from pipeplan.cli.options import force_option, json_option, output_file, quiet_option
from pipeplan.cli.output import is_watched, note, print_answer, print_json, progress_bar
from pipeplan.cluster_data import cluster_toml, local
from pipeplan.errors import InputError
from pipeplan.link_fit.alpha_beta import AlphaBetaFit, LinkSeries
from pipeplan.link_fit.find_levels import Nesting, find_levels
from pipeplan.link_fit.to_cluster import ClusterFromLinks, MeasuredLink, build_cluster
from pipeplan.util.files import refuse_to_replace
from pipeplan.util.text import shell_path
from pipeplan.util.typed import shortened, whole_number
from pipeplan.util.units import show_size, show_time
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.torch_check import import_problem
from pipeplan_measure.pair_schedule import BenchmarkSettings, MeasuredLinks, PairRates, ServerShare

_HEADINGS = ("level", "joins", "link\nGbit/s", "latency", "message\nGbit/s", "±", "all-reduce\nGbit/s", "±", "sizes")
Progress = Callable[[int, int, str], None]
"""A function that gets the number of steps done, the total number of steps, and the name of the current step."""


class _Links(click.Command):
    def format_usage(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage("pipeplan profile", "--links [OPTIONS]")


@click.command("links", cls=_Links)
@click.option(
    "--workers", type=int, metavar="N", help="Start this number of workers here  [default: those of --cluster local]"
)
@click.option(
    "--servers",
    type=int,
    default=1,
    metavar="N",
    help="Measure N machines, each of which has NODE_RANK (its number from 0), MASTER_ADDR and MASTER_PORT set.",
)
@output_file(Path("cluster.toml"))
@click.option("--name", help="Give the cluster this name  [default: that of the file]")
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    help="Measure between devices of this kind  [default: cuda if there is a GPU]",
)
@click.option("--budget", type=float, default=45.0, metavar="S", help="Measure for about this many seconds.")
@click.option("--timeout", type=float, default=60.0, metavar="S", help="Wait this many seconds for a worker.")
@force_option
@json_option
@quiet_option
def command(
    workers: int | None,
    servers: int,
    output: Path,
    name: str | None,
    device: str | None,
    budget: float,
    timeout: float,
    force: bool,
    as_json: bool,
) -> None:
    """Measure messages and all-reduces between workers, and write a cluster file with the measured links.

    To measure several servers, run the command on each of them, with NODE_RANK counted from 0. The first server writes
    the file.

    \b
    pipeplan profile --links --workers 3 -o local.toml
    NODE_RANK=0 MASTER_ADDR=server0 MASTER_PORT=29500 pipeplan profile --links --servers 2 --workers 4
    """
    for option, value in (("--budget", budget), ("--timeout", timeout)):
        if not 0 < value < 1e6:
            raise InputError(f"{option} takes a number of seconds above 0, not {value:g}")
    settings = BenchmarkSettings(device or "", timeout, budget, refusal=_refusal(output, force))
    measured = measure_servers(workers, servers, settings)
    if measured is None:
        return
    built = cluster_of(measured, name or output.stem)
    cluster_toml.write_cluster(built.cluster, output, _remarks(measured, built))
    if as_json:
        print_json(built.cluster.to_json())
    else:
        print_answer(links_table(built))
    for remark in built.notes:
        note(f"note: {remark}")
    note(f"written: {output}\nnext: pipeplan solve --cluster {shell_path(output)}")


def measure_servers(workers: int | None, servers: int, settings: BenchmarkSettings) -> MeasuredLinks | None:
    """Measure between `workers` workers on each of `servers` servers; this machine is one of them.

    If `settings.device` is empty, a GPU is used if there is one. The first server returns the result, the others return
    None. Raises `InputError`. On several servers, an error in `settings.refusal` is raised once all workers have
    connected.
    """
    share = _share(servers)
    if workers is not None and workers * servers < 2:
        raise InputError(f"there is no link with {workers} worker{'s' * (workers != 1)}: give --workers 2 or more")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise InputError("workers are started by pipeplan: run it once on each server, without torchrun or srun tasks")
    if settings.refusal and share is None:
        raise InputError(settings.refusal)
    hardware, count = _hardware(settings.device or None, workers)
    if count * servers < 2:
        raise InputError(f"this machine would have one worker, a {hardware.name}: give --workers 2")
    return _measure(replace(settings, device=hardware.kind, facts=asdict(hardware)), count, share)


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
    sizes = [size for series in link.series for size, _ in series.samples]
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


def _share(servers: int) -> ServerShare | None:
    """The role of this server among several, from the environment variables that launch.sh also reads."""
    if servers == 1:
        return None
    if servers < 1:
        raise InputError(f"--servers takes a number from 1, not {servers}")
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise InputError(
            f"--servers {servers}: run this on each with NODE_RANK=0 to {servers - 1}, and MASTER_ADDR and MASTER_PORT "
            f"of server 0 (not set: {', '.join(missing)})"
        )
    number = whole_number(os.environ["NODE_RANK"])
    if number is None or number >= servers:
        raise InputError(
            f"NODE_RANK is {shortened(os.environ['NODE_RANK'])}: it must be this server's number, 0 to {servers - 1}"
        )
    if not 0 < (whole_number(os.environ["MASTER_PORT"]) or 0) < 1 << 16:
        raise InputError(f"MASTER_PORT is {shortened(os.environ['MASTER_PORT'])}: it must be a port number")
    return ServerShare(servers, number)


def _refusal(output: Path, force: bool) -> str:
    """The reason why the file cannot be written; empty if it can be."""
    try:
        refuse_to_replace(output, force=force)
    except InputError as error:
        return str(error)
    return ""


def _hardware(device: str | None, workers: int | None) -> tuple[local.Hardware, int]:
    """The hardware of each worker on this machine, and the number of workers."""
    gpus = local.local_gpus() if device != "cpu" else []
    if device == "cuda" and not gpus:
        raise InputError("--device cuda: nvidia-smi finds no GPU here; give --device cpu, or leave --device out")
    if gpus and (device == "cuda" or workers is None or workers <= len(gpus)):
        return gpus[0], workers or len(gpus)
    here = local.local_processors()
    return here, workers or here.cores


def _nesting(measured: PairRates, kind: str) -> Nesting:
    # Processes move between the cores of a CPU, so islands of fast links among them would be accidental.
    return find_levels(measured.pairs, measured.places, islands=kind == "cuda")


def _measure(settings: BenchmarkSettings, workers: int, share: ServerShare | None) -> MeasuredLinks | None:
    """Measure with `workers` workers of this machine; returns None on servers other than the first."""
    # Otherwise, if a worker is lost, torch prints pages of traces beside our one-line error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if why := import_problem():
        raise InputError(f"measuring links needs torch: {why[0]}; {why[1]}")
    from pipeplan_measure.links import measure_links

    def levels(measured: PairRates) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return _nesting(measured, settings.device).partitions

    try:
        with _progress() as progress:
            return measure_links(workers, settings, levels, progress, share)
    except LaunchError as error:
        raise InputError(str(error)) from error


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a progress bar in terminals. Elsewhere, print a line whenever another kind of measurement begins."""
    in_lines = not is_watched()
    begun: list[str] = []
    with progress_bar("waiting for the workers") as update:

        def progress(done: int, total: int, step: str) -> None:
            update(done, total, step)
            kind = step.partition(":")[0]
            if in_lines and kind not in (*begun[-1:], "done"):
                begun.append(kind)
                note(f"measuring {kind}")

        yield progress


def cluster_of(measured: MeasuredLinks, name: str) -> ClusterFromLinks:
    """The cluster that was measured."""
    hardware = [local.Hardware(**facts) for facts in measured.facts]  # type: ignore[arg-type]
    nesting = _nesting(measured.found, hardware[0].kind)
    devices = [
        one.shared_by(measured.machines.count(machine))
        for one, machine in zip(hardware, measured.machines, strict=True)
    ]
    series = [LinkSeries(timed.kind, timed.level, timed.ranks, timed.way, timed.samples) for timed in measured.timed]
    gpus = local.local_gpus() if hardware[0].kind == "cuda" else []
    if len(set(measured.machines)) == 1 and len(gpus) == len(devices):
        devices = local.devices_of(gpus)
    return build_cluster(name, nesting, series, devices, datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"))


def _remarks(measured: MeasuredLinks, built: ClusterFromLinks) -> list[str]:
    workers, servers = len(measured.machines), built.cluster.servers
    lines = [f"Measured by pipeplan profile --links, {workers} workers on {servers} server{'s' * (servers > 1)}."]
    lines.append("The method and the figures are described in docs/cluster.md of pipeplan.")
    return lines + [f"Observed, but not expressed in this file: {note}." for note in built.notes]
