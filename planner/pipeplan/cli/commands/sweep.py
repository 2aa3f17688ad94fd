"""`pipeplan sweep`: the best plan for every combination of servers, links, memory, microbatch and schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeplan.api import cluster
from pipeplan.cli.options import PATH, NumberRange, force_option, json_option, quiet_option
from pipeplan.cli.output import note, print_answer, print_json, print_warning, progress_bar
from pipeplan.cli.problem_options import GroupedCommand, problem_options, solver_option
from pipeplan.cli.solving import checked_option_fields, positive_time_limit, read_profile
from pipeplan.errors import DisagreementError, InputError
from pipeplan.planning.settings import Settings
from pipeplan.profile_data.profile import Profile
from pipeplan.questions import SEARCH
from pipeplan.sweeps import plot, rows
from pipeplan.sweeps.points import SweepAxes, SweepPoint, SweptQuestion, sweep_points
from pipeplan.sweeps.rows import SweepRow
from pipeplan.sweeps.sweep import PointAnswer, solve_points
from pipeplan.sweeps.terminal import sweep_table
from pipeplan.util.files import refuse_to_replace, write_text
from pipeplan.util.units import parse_rate, parse_size

CSV_MARK, SVG_MARK = b"cost_per_million_samples,pareto", b"samples per second, by number of workers"
"""Texts by which a file is recognised as a table or a plot of a sweep."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class _Outputs:
    """The files to write, and the form of the answer on standard output."""

    csv: Path | None
    svg: Path | None
    as_json: bool


@click.command("sweep", cls=GroupedCommand)
@problem_options("servers", "workers", "microbatch", "schedule")
@click.option("--servers", metavar="1,2,4", help="Plan for these numbers of servers.")
@click.option(
    "--workers", metavar="1,2,4", help="Plan for these numbers of workers, on a cluster of one server such as local."
)
@click.option(
    "--bandwidth",
    multiple=True,
    metavar="LEVEL=RATE,…",
    help="Plan for these bandwidths of a level: cluster=10Gbit/s,25Gbit/s.",
)
@click.option("--memory", metavar="8GiB,16GiB", help="Plan for these memory sizes of a device.")
@click.option("--microbatch", metavar="32,64", help="Plan for these microbatch sizes  [default: the best]")
@click.option("--schedule", metavar="A,B", help="Plan for these training schedules  [default: the best]")
@click.option(
    "--price", type=NumberRange(min=0), help="Assume this price of a server for an hour  [default: that of the cluster]"
)
@solver_option("dp")
@click.option(
    "--time-limit",
    type=float,
    help="Search for at most this many seconds in all  [default: 60 for each point, without a limit in all]",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Run this number of processes  [default: one for each processor]"
)
@click.option("--csv", "csv_file", type=PATH, help="Write all figures to this file.")
@click.option("--svg", "svg_file", type=PATH, help="Write the scaling plot to this file.")
@force_option
@json_option
@quiet_option
def command(
    servers: str | None,
    workers: str | None,
    bandwidth: tuple[str, ...],
    memory: str | None,
    microbatch: str | None,
    schedule: str | None,
    price: float | None,
    solver: str,
    time_limit: float | None,
    jobs: int | None,
    csv_file: Path | None,
    svg_file: Path | None,
    force: bool,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Solve for every combination of the listed values, several at a time, and compare the plans.

    Files are only written with --csv and --svg. Older ones of a sweep are replaced, any other only with --force.

    \b
    pipeplan sweep --cluster A --servers 1,2,4,8 --bandwidth cluster=10Gbit/s,25Gbit/s
    pipeplan sweep profile.json --cluster A --memory 8GiB,16GiB --microbatch 32,64 --price 12.24 --csv sweep.csv
    """
    if time_limit is not None:
        positive_time_limit(time_limit)
    settings = replace(SEARCH, solver=solver)
    axes = SweepAxes(
        bandwidths=_bandwidths(bandwidth),
        memory=_listed(memory, "--memory", parse_size),
        microbatch=_listed(microbatch, "--microbatch", _integer),
        schedules=_listed(schedule, "--schedule", _text),
    )
    source = read_profile(arguments["profile"])
    grid = _points(
        source.profile,
        arguments,
        _listed(servers, "--servers", _integer),
        _listed(workers, "--workers", _integer),
        axes,
    )
    _refuse_outputs(csv_file, svg_file, force)
    note(source.text, dim=True)
    answers, finished = _run(grid, settings, jobs, time_limit)
    solved = [SweepRow(grid[i], answers[i], rows.hourly_price(grid[i], price)) for i in sorted(answers)]
    print_warning(source.profile, grid[0].cluster, as_json=as_json)
    _write_and_print(solved, len(grid), _Outputs(csv_file, svg_file, as_json))
    sys.stdout.flush()
    if not finished:
        raise click.Abort
    if any(row.answer.contradiction for row in solved):
        raise DisagreementError("the solvers disagree about a point, which is a defect of pipeplan: see its line")


def _refuse_outputs(csv_file: Path | None, svg_file: Path | None, force: bool) -> None:
    """Raise an `InputError` for files that cannot be written or are of another kind, before the long search."""
    if csv_file is not None and svg_file is not None and csv_file.absolute() == svg_file.absolute():
        raise InputError(f"--csv and --svg cannot both be {csv_file}: give another file for one of them")
    if csv_file is not None:
        refuse_to_replace(csv_file, "--csv", force=force, mark=CSV_MARK, what="the table of a sweep")
    if svg_file is not None:
        refuse_to_replace(svg_file, "--svg", force=force, mark=SVG_MARK, what="the plot of a sweep")


def _points(
    profile: Profile, arguments: dict[str, Any], servers: list[int], workers: list[int], axes: SweepAxes
) -> list[SweepPoint]:
    name = arguments["cluster_name"]
    clusters = [
        cluster(name, servers=count, workers=worker_count)
        for count in servers or (None,)
        for worker_count in workers or (None,)
    ]
    # The schedules are an axis; here they are only checked against the other options.
    fields = checked_option_fields(arguments | {"schedule": ",".join(axes.schedules) or None})
    fields.pop("schedule", None)
    question = SweptQuestion(fields, arguments["batch"], arguments["staleness"])
    return sweep_points(profile, clusters, question, axes)


def _run(
    grid: list[SweepPoint], settings: Settings, jobs: int | None, time_limit: float | None
) -> tuple[dict[int, PointAnswer], bool]:
    """The answers by number of the point, and whether every point has one; it has not if Ctrl-C came."""
    answers: dict[int, PointAnswer] = {}
    with progress_bar("solving") as update:
        update(0, len(grid), "solving")

        def collect(number: int, answer: PointAnswer) -> None:
            answers[number] = answer
            update(len(answers), len(grid), "solving")

        finished = solve_points(grid, settings, jobs, collect, time_limit)
    return answers, finished


def _write_and_print(solved: list[SweepRow], planned: int, outputs: _Outputs) -> None:
    """Write the files before the table is printed, so that `| head`, which closes our output early, keeps them."""
    if outputs.csv is not None:
        write_text(outputs.csv, rows.sweep_csv(solved))
        note(f"written: {outputs.csv}")
    if outputs.svg is not None:
        _draw(solved, outputs.svg)
    if outputs.as_json:
        print_json(rows.sweep_json(solved, planned=planned))
        return
    print_answer(sweep_table(solved), fold=True, narrow=True)
    if len(solved) < planned:
        note(f"{len(solved)} of {planned} points were solved")


def _draw(solved: list[SweepRow], file: Path) -> None:
    title = f"{solved[0].point.profile.model_name} on cluster {solved[0].point.cluster.name}" if solved else ""
    drawing = plot.scaling_svg(solved, title)
    if drawing is None:
        note(f"not written: {file}, because fewer than two numbers of workers have a plan")
        return
    write_text(file, drawing)
    note(f"written: {file}")


def _bandwidths(texts: tuple[str, ...]) -> dict[str, list[float]]:
    """Bandwidths in bytes/s by the name of the level, from texts such as `cluster=10Gbit/s,25Gbit/s`."""
    rates_of: dict[str, list[float]] = {}
    for text in texts:
        level, equals, rates = text.partition("=")
        if not equals:
            raise InputError(
                f"--bandwidth: expected a level and its rates, as in cluster=10Gbit/s,25Gbit/s, not {text!r}"
            )
        if level in rates_of:
            raise InputError(f"--bandwidth: level {level!r} is named twice; list its rates with commas")
        rates_of[level] = _listed(rates, f"--bandwidth {level}", parse_rate)
    return rates_of


def _listed(text: str | None, where: str, parse: Callable[[object, str], Value]) -> list[Value]:
    """The distinct values of a list with commas, in its order."""
    if text is None:
        return []
    return list(dict.fromkeys(parse(item.strip(), where) for item in text.split(",")))


def _text(value: object, _: str) -> str:
    return str(value)


def _integer(value: object, where: str) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise InputError(f"{where}: expected whole numbers such as 1,2,4, found {value!r}") from None
