"""`pipeplan trace`: the predicted and the measured timeline as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeplan.cli.shared.options import force_option, output_file, quiet_option, refuse_output
from pipeplan.cli.shared.output import note
from pipeplan.errors import InputError
from pipeplan.run_data.run_folder import read_run_of_plan
from pipeplan.simulation import perfetto, scenario
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.util.files import write_text

TRACE_MARK = b'"traceEvents"'
"""The field of a trace by which its file is recognised."""
MOST_MINIBATCHES = 100_000
DEFAULT_MINIBATCHES = 256
"""The number of minibatches that a run records."""


@click.command("trace")
@click.argument("plan_folder", metavar="[PLAN]", type=click.Path(path_type=Path), default=Path("plan"))
@click.argument("run_folder", metavar="[RUN]", required=False, type=click.Path(path_type=Path))
@output_file(Path("trace.json"))
@force_option
@click.option(
    "--only",
    type=click.Choice([perfetto.PREDICTED, perfetto.MEASURED]),
    help="Write only one of the two timelines  [default: both]",
)
@click.option(
    "--minibatches",
    type=click.IntRange(1, MOST_MINIBATCHES),
    default=DEFAULT_MINIBATCHES,
    show_default=True,
    help="Number of minibatches, from the first one; for a run, at most the recorded ones.",
)
@quiet_option
def command(
    plan_folder: Path, run_folder: Path | None, output: Path, force: bool, only: str | None, minibatches: int
) -> None:
    """Write the predicted timeline of a plan and the measured one of a run as one trace, on a common clock.

    PLAN is a plan folder (default: ./plan), RUN one of its run folders (default: the latest). Open the trace at
    ui.perfetto.dev or chrome://tracing. An older trace is replaced, any other file only with --force.

    \b
    pipeplan trace
    pipeplan trace plan plan/runs/20260131T120000Z -o trace.json
    pipeplan trace plan --only predicted
    """
    refuse_output(output, TRACE_MARK, "a trace", force)
    plan = scenario.read_scenario(plan_folder)
    if only == perfetto.PREDICTED:
        if run_folder is not None:
            raise InputError(f"--only predicted needs no run: leave out {run_folder}")
        document = perfetto.trace_document(plan, simulate_schedule(plan, minibatches))
    else:
        run = read_run_of_plan(plan_folder, run_folder)
        make = perfetto.measured_document if only == perfetto.MEASURED else perfetto.overlaid_document
        document = make(plan, run, minibatches)
    write_text(output, json.dumps(document, allow_nan=False) + "\n")
    note(f"written: {output} (open it at ui.perfetto.dev)")
