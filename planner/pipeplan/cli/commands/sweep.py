"""`pipeplan sweep`: the best plan for every combination of servers, links, memory, microbatch and schedule."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeplan.api import cluster
from pipeplan.cli.options import PATH, NumberRange, force_option, json_option, quiet_option
from pipeplan.cli.output import note, print_answer, print_json, print_warning, progress_bar
from pipeplan.cli.problem_options import GroupedCommand, problem_options
from pipeplan.cli.solving import checked_option_fields, positive_time_limit, read_profile
from pipeplan.errors import InputError
from pipeplan.planning.settings import Settings
from pipeplan.questions import SEARCH
from pipeplan.sweeps import rows
from pipeplan.sweeps.points import SweepAxes, SweepPoint, sweep_points
from pipeplan.sweeps.rows import SweepRow
from pipeplan.sweeps.sweep import PointAnswer, solve_points
from pipeplan.sweeps.terminal import sweep_table
from pipeplan.util.files import refuse_to_replace, write_text
from pipeplan.util.units import parse_rate, parse_size

CSV_MARK = b"cost_per_million_samples,pareto"
"""Text by which a file is recognised as the table of a sweep."""
Value = TypeVar("Value")


def _values(text: str | None, where: str, parse: Callable[[object, str], Value]) -> list[Value]:
    """The distinct values of a comma-separated list, in its order."""
    return [] if text is None else list(dict.fromkeys(parse(item.strip(), where) for item in text.split(",")))


def _list_option(name: str, metavar: str, parse: Callable[[object, str], Any], words: str) -> Callable[..., Any]:
    """An option for several values, which the command gets as a list."""

    def parsed(context: click.Context, parameter: click.Parameter, text: str | None) -> list[Any]:
        return _values(text, name, parse)

    return click.option(name, metavar=metavar, callback=parsed, help=words)


def _integer(value: object, where: str) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise InputError(f"{where}: expected whole numbers such as 1,2,4, found {value!r}") from None


def _bandwidths(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, list[float]]:
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
        rates_of[level] = _values(rates, f"--bandwidth {level}", parse_rate)
    return rates_of


@click.command("sweep", cls=GroupedCommand)
@problem_options("servers", "workers", "microbatch", "schedule")
@_list_option("--servers", "1,2,4", _integer, "Plan for these numbers of servers.")
@_list_option(
    "--workers", "1,2,4", _integer, "Plan for these numbers of workers, on a cluster of one server such as local."
)
@click.option(
    "--bandwidth",
    multiple=True,
    metavar="LEVEL=RATE,…",
    callback=_bandwidths,
    help="Plan for these bandwidths of a level: cluster=10Gbit/s,25Gbit/s.",
)
@_list_option("--memory", "8GiB,16GiB", parse_size, "Plan for these memory sizes of a device.")
@_list_option("--microbatch", "32,64", _integer, "Plan for these microbatch sizes  [default: the best]")
@_list_option(
    "--schedule", "A,B", lambda value, _: str(value), "Plan for these training schedules  [default: the best]"
)
@click.option(
    "--price", type=NumberRange(min=0), help="Assume this price of a server for an hour  [default: that of the cluster]"
)
@click.option(
    "--time-limit",
    type=float,
    help="Search for at most this many seconds in all  [default: 60 for each point, without a limit in all]",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Run this number of processes  [default: one for each processor]"
)
@click.option("--csv", "csv_file", type=PATH, help="Write all figures to this file.")
@force_option
@json_option
@quiet_option
def command(
    servers: list[int],
    workers: list[int],
    bandwidth: dict[str, list[float]],
    memory: list[int],
    microbatch: list[int],
    schedule: list[str],
    price: float | None,
    time_limit: float | None,
    jobs: int | None,
    csv_file: Path | None,
    force: bool,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Solve for every combination of the listed values, several at a time, and compare the plans.

    Only --csv writes a file. The table of an older sweep is replaced; any other file is replaced only with --force.

    \b
    pipeplan sweep --cluster A --servers 1,2,4,8 --bandwidth cluster=10Gbit/s,25Gbit/s
    pipeplan sweep profile.json --cluster A --memory 8GiB,16GiB --microbatch 32,64 --price 12.24 --csv sweep.csv
    """
    if time_limit is not None:
        positive_time_limit(time_limit)
    source, name = read_profile(arguments["profile"]), arguments["cluster_name"]
    counts = itertools.product(servers or (None,), workers or (None,))
    clusters = [cluster(name, servers=server_count, workers=count) for server_count, count in counts]
    # The schedules are an axis of the sweep. Here they are only checked against the other options.
    fields = checked_option_fields(arguments | {"schedule": ",".join(schedule) or None})
    fields.pop("schedule", None)
    asked = {name: arguments[name] for name in ("batch", "staleness")}
    shared = SweepPoint(source.profile, clusters[0], **asked, options=fields)
    grid = sweep_points(shared, clusters, SweepAxes(bandwidth, memory, microbatch, schedule))
    if csv_file is not None:
        refuse_to_replace(csv_file, "--csv", force=force, mark=CSV_MARK, what="the table of a sweep")
    note(source.text, dim=True)
    answers, finished = _run(grid, SEARCH, jobs, time_limit)
    solved = [SweepRow(grid[i], answers[i], rows.hourly_price(grid[i], price)) for i in sorted(answers)]
    print_warning(source.profile, grid[0].cluster, as_json=as_json)
    # Written before the table is printed, so that `| head`, which closes our output early, keeps the files.
    if csv_file is not None:
        write_text(csv_file, rows.sweep_csv(solved))
        note(f"written: {csv_file}")
    if as_json:
        print_json(rows.sweep_json(solved, planned=len(grid)))
    else:
        print_answer(sweep_table(solved), fold=True, narrow=True)
        if len(solved) < len(grid):
            note(f"{len(solved)} of {len(grid)} points were solved")
    sys.stdout.flush()
    if not finished:
        raise click.Abort


def _run(
    grid: list[SweepPoint], settings: Settings, jobs: int | None, time_limit: float | None
) -> tuple[dict[int, PointAnswer], bool]:
    """(answers by number of the point, whether every point has an answer). After Ctrl-C some points have no answer."""
    answers: dict[int, PointAnswer] = {}
    with progress_bar("solving") as update:
        update(0, len(grid), "solving")

        def collect(number: int, answer: PointAnswer) -> None:
            answers[number] = answer
            update(len(answers), len(grid), "solving")

        finished = solve_points(grid, settings, jobs, collect, time_limit)
    return answers, finished
