"""`pipeplan sweep`: the best plan for every combination of servers, links, memory, minibatch and schedule."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipeplan.api import cluster
from pipeplan.cli.explain import answer_console
from pipeplan.cli.given import check_schedules, options_of, problem_arguments, read_profile
from pipeplan.cli.options import json_option, quiet_option
from pipeplan.errors import DisagreementError, InputError
from pipeplan.files import write_text
from pipeplan.plan import ACCUMULATING
from pipeplan.problem import Options
from pipeplan.profile_data import Profile
from pipeplan.solving import Settings
from pipeplan.sweep import plot, rows
from pipeplan.sweep.grid import Axes, Point, points
from pipeplan.sweep.rows import Row
from pipeplan.sweep.run import Answer, run
from pipeplan.sweep.show import show
from pipeplan.units import parse_rate, parse_size

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Sinks:
    """Where the answer goes."""

    csv: Path | None
    svg: Path | None
    as_json: bool


@click.command("sweep")
@problem_arguments("servers", "workers", "minibatch", "schedule")
@click.option("--servers", metavar="1,2,4", help="Numbers of servers.")
@click.option("--workers", metavar="1,2,4", help="With --cluster local: numbers of workers.")
@click.option(
    "--bandwidth", multiple=True, metavar="LEVEL=RATE,…", help="Rates of a level's links: cluster=10Gbit/s,25Gbit/s."
)
@click.option("--memory", metavar="8GiB,16GiB", help="Memory of a device.")
@click.option("--minibatch", metavar="32,64", help="Minibatch sizes, as with solve --minibatch.")
@click.option("--schedule", metavar="A,B", help="Schedules of training.")
@click.option("--price", type=click.FloatRange(min=0), help="Of a server for an hour  [default: as the cluster says]")
@click.option("--solver", type=click.Choice(["dp", "ilp", "both"]), default="dp", show_default=True)
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Seconds for each ILP.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes  [default: one a processor]")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures to a file.")
@click.option("--svg", "svg_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the scaling plot.")
@json_option
@quiet_option
def command(
    servers: str | None,
    workers: str | None,
    bandwidth: tuple[str, ...],
    memory: str | None,
    minibatch: str | None,
    schedule: str | None,
    price: float | None,
    solver: str,
    time_limit: float,
    jobs: int | None,
    csv_file: Path | None,
    svg_file: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Solve for every combination of what is listed, several at a time, and compare. Nothing is written but what is
    asked for.

    \b
    pipeplan sweep --cluster A --servers 1,2,4,8 --bandwidth cluster=10Gbit/s,25Gbit/s
    pipeplan sweep profile.json --cluster A --memory 8GiB,16GiB --minibatch 32,64 --price 12.24 --csv sweep.csv
    """
    if not time_limit > 0:
        raise InputError(f"--time-limit must be above 0 seconds, not {time_limit:g}")
    axes = Axes(
        bandwidths=_bandwidths(bandwidth),
        memory=_listed(memory, "--memory", parse_size),
        minibatch=_listed(minibatch, "--minibatch", _whole),
        schedules=_listed(schedule, "--schedule", _text),
    )
    profile, origin = _profile(given)
    grid = _points(profile, given, _listed(servers, "--servers", _whole), _listed(workers, "--workers", _whole), axes)
    Console(stderr=True, highlight=False).print(origin, style="dim", markup=False, soft_wrap=True)
    settings = Settings(solver=solver, time_limit_s=time_limit, certify=False)
    answers, finished = _run(grid, settings, jobs)
    found = [Row(grid[i], answers[i], rows.price_of(grid[i], price)) for i in sorted(answers)]
    _deliver(found, len(grid), _Sinks(csv_file, svg_file, as_json))
    sys.stdout.flush()
    if not finished:
        raise click.Abort
    if any(row.answer.contradiction for row in found):
        raise DisagreementError("the solvers disagree about a point, which is a defect of pipeplan: see its line")


def _profile(given: dict[str, Any]) -> tuple[Profile, str]:
    source = read_profile(given["profile"], None)
    return source.profile, source.text


def _points(profile: Profile, given: dict[str, Any], servers: list[int], workers: list[int], axes: Axes) -> list[Point]:
    name = given["cluster_name"]
    clusters = [
        cluster(name, servers=count, workers=each) for count in servers or (None,) for each in workers or (None,)
    ]
    return points(profile, clusters, _options(given, clusters[0].device.kind, axes), axes)


def _options(given: dict[str, Any], kind: str, axes: Axes) -> Options:
    check_schedules(axes.schedules, given)
    # Each point has its own; any that goes with the other arguments will do until then.
    last = max(axes.schedules, key=lambda name: name in ACCUMULATING, default=None)
    return options_of(given | {"schedule": last}, kind)


def _run(grid: list[Point], settings: Settings, jobs: int | None) -> tuple[dict[int, Answer], bool]:
    """The answers by number of the point, and whether there is one for every point."""
    answers: dict[int, Answer] = {}
    console = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("solving", total=len(grid))

        def tell(number: int, answer: Answer) -> None:
            answers[number] = answer
            bar.advance(task)

        finished = run(grid, settings, jobs, tell)
    return answers, finished


def _deliver(found: list[Row], planned: int, sinks: _Sinks) -> None:
    """Files first: whoever closes our output early still has them."""
    notes = Console(stderr=True, highlight=False)
    if sinks.csv is not None:
        write_text(sinks.csv, rows.to_csv(found))
        notes.print(f"written: {sinks.csv}", markup=False, soft_wrap=True)
    if sinks.svg is not None:
        _draw(found, sinks.svg, notes)
    if sinks.as_json:
        click.echo(json.dumps(rows.to_json(found, planned=planned), indent=1, allow_nan=False, ensure_ascii=False))
        return
    show(found, answer_console())
    if len(found) < planned:
        notes.print(f"{len(found)} of {planned} points were solved", markup=False)


def _draw(found: list[Row], file: Path, notes: Console) -> None:
    title = f"{found[0].point.profile.model_name} on cluster {found[0].point.cluster.name}" if found else ""
    drawing = plot.svg(found, title)
    if drawing is None:
        notes.print(f"not written: {file}, as there are no two numbers of workers with a plan", markup=False)
        return
    write_text(file, drawing)
    notes.print(f"written: {file}", markup=False, soft_wrap=True)


def _bandwidths(given: tuple[str, ...]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for text in given:
        level, equals, rates = text.partition("=")
        if not equals:
            raise InputError(
                f"--bandwidth: expected a level and its rates, as in cluster=10Gbit/s,25Gbit/s, not {text!r}"
            )
        if level in found:
            raise InputError(f"--bandwidth: level {level!r} is named twice; list its rates with commas")
        found[level] = _listed(rates, f"--bandwidth {level}", parse_rate)
    return found


def _listed(text: str | None, where: str, parse: Callable[[object, str], Value]) -> list[Value]:
    """The values of a list with commas; the same value twice is one."""
    if text is None:
        return []
    return list(dict.fromkeys(parse(item.strip(), where) for item in text.split(",")))


def _text(value: object, _: str) -> str:
    return str(value)


def _whole(value: object, where: str) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise InputError(f"{where}: expected whole numbers such as 1,2,4, found {value!r}") from None
