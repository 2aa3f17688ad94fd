"""`pipeplan simulate`: replay a plan in simulated time."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from pipeplan.api import simulate
from pipeplan.cli.options import json_option, quiet_option
from pipeplan.errors import InputError
from pipeplan.files import write_text
from pipeplan.measured.run import read_of
from pipeplan.simulation import picture
from pipeplan.simulation.simulated import MOST_MINIBATCHES
from pipeplan.simulation.trace import overlaid_document, trace_document

PIPED_WIDTH = 80


@click.command("simulate")
@click.argument("plan_folder", type=click.Path(path_type=Path), default=Path("plan"))
@click.option(
    "--minibatches", type=click.IntRange(1, MOST_MINIBATCHES), help="How many  [default: enough for a steady state]"
)
@click.option("--trace", "trace_file", type=click.Path(path_type=Path), help="Write a trace for Perfetto or Chrome.")
@json_option
@quiet_option
@click.option(
    "--run", "run_folder", metavar="RUN", type=click.Path(path_type=Path), help="Draw what this run measured beneath."
)
@click.option(
    "--width", type=click.IntRange(40, 1000), help="Columns of the timeline  [default: the terminal's, or 80]"
)
def command(
    plan_folder: Path,
    minibatches: int | None,
    trace_file: Path | None,
    as_json: bool,
    run_folder: Path | None,
    width: int | None,
) -> None:
    """Replay the plan in PLAN_FOLDER (./plan unless given) in simulated time: the schedule is the one that would run.

    \b
    pipeplan simulate
    pipeplan simulate plan --minibatches 200 --trace trace.json
    pipeplan simulate plan --run plan/runs/20260131T120000Z
    """
    if as_json and run_folder is not None:
        raise InputError("--run is drawn, and --json draws nothing: leave out one of them")
    run = None if run_folder is None else read_of(plan_folder, run_folder)
    simulated = simulate(plan_folder, minibatches)
    plan, replayed, report = simulated.scenario, simulated.replayed, simulated.report
    if trace_file is not None:
        document = trace_document(plan, replayed) if run is None else overlaid_document(plan, run)
        write_text(trace_file, json.dumps(document, allow_nan=False) + "\n")
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1, allow_nan=False, ensure_ascii=False))
        return
    console = Console(highlight=False, markup=False)
    columns = width or (console.width if console.is_terminal else PIPED_WIDTH)
    picture.show(plan, replayed, report, console, columns, run)
    if trace_file is not None:
        note = Console(stderr=True, highlight=False)
        note.print(f"written: {trace_file} (open it at ui.perfetto.dev)", markup=False, soft_wrap=True)
