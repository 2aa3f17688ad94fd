"""`pipeplan trace`: the predicted and the measured timeline as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeplan.cli.options import force_option, output_file, quiet_option
from pipeplan.cli.output import note
from pipeplan.cli.overwrite import refuse_another
from pipeplan.errors import InputError
from pipeplan.files import refuse_unwritable, write_text
from pipeplan.measured.run import read_of
from pipeplan.simulation import scenario, trace
from pipeplan.simulation.engine import replay

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
    type=click.Choice([trace.PREDICTED, trace.MEASURED]),
    help="Write only one of the two timelines  [default: both]",
)
@click.option(
    "--minibatches",
    type=click.IntRange(1, MOST_MINIBATCHES),
    default=DEFAULT_MINIBATCHES,
    show_default=True,
    help="Number of minibatches from the first on; of a run at most those that it recorded.",
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
    refuse_unwritable(output)
    refuse_another(output, b'"traceEvents"', "a trace", force)
    plan = scenario.read(plan_folder)
    if only == trace.PREDICTED:
        if run_folder is not None:
            raise InputError(f"--only predicted needs no run: leave out {run_folder}")
        document = trace.trace_document(plan, replay(plan, minibatches))
    else:
        run = read_of(plan_folder, run_folder)
        make = trace.measured_document if only == trace.MEASURED else trace.overlaid_document
        document = make(plan, run, minibatches)
    write_text(output, json.dumps(document, allow_nan=False) + "\n")
    note(f"written: {output} (open it at ui.perfetto.dev)")
