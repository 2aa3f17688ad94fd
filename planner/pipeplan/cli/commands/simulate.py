"""`pipeplan simulate`: replay a plan in simulated time."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeplan.api import simulate
from pipeplan.cli.options import PATH, force_option, json_option, quiet_option
from pipeplan.cli.output import answer_width, note, print_answer, print_json, print_line, print_warning
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.errors import InputError
from pipeplan.problem import plan_file
from pipeplan.problem.plan_profile import profile_if_found
from pipeplan.run_data.run_folder import read_run_of_plan
from pipeplan.simulation.perfetto import overlaid_document, trace_document
from pipeplan.simulation.simulate import MOST_MINIBATCHES
from pipeplan.simulation.terminal import simulation_parts
from pipeplan.util.files import refuse_to_replace, write_text

TRACE_MARK = b'"traceEvents"'
"""The field by which a trace file is recognised."""
LATEST = "latest"
"""Value of `--run` for the latest run of the plan."""


@click.command("simulate")
@click.argument("plan_folder", type=PATH, default=Path("plan"))
@click.option(
    "--microbatches",
    type=click.IntRange(1, MOST_MINIBATCHES),
    help="Simulate this number of microbatches  [default: enough for a steady state]",
)
@click.option("--trace", "trace_file", type=PATH, help="Write a trace for Perfetto to this file.")
@click.option(
    "--run",
    "run_folder",
    metavar="RUN|latest",
    help="Add the measured timeline of this run, or of the latest one, to the trace.",
)
@force_option
@json_option
@quiet_option
def command(
    plan_folder: Path,
    microbatches: int | None,
    trace_file: Path | None,
    run_folder: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Replay the plan in PLAN_FOLDER (default: ./plan) in simulated time, with the schedule that the executor runs.

    Open a trace at ui.perfetto.dev or chrome://tracing. An older trace is replaced; any other file is replaced only
    with --force.

    \b
    pipeplan simulate
    pipeplan simulate plan --microbatches 200 --trace trace.json
    pipeplan simulate plan --run latest --trace trace.json
    """
    run = None
    if trace_file is not None:
        refuse_to_replace(trace_file, "--trace", force=force, mark=TRACE_MARK, what="a trace")
    if run_folder is not None:
        if trace_file is None:
            raise InputError("--run adds a run to a trace: give --trace FILE, or draw it with pipeplan report PLAN RUN")
        run = read_run_of_plan(plan_folder, None if run_folder == LATEST else Path(run_folder))
    simulated = simulate(plan_folder, microbatches)
    if trace_file is not None:
        plan = simulated.scenario
        document = (
            trace_document(plan, simulated.replayed) if run is None else overlaid_document(plan, run, microbatches)
        )
        write_text(trace_file, json.dumps(document, allow_nan=False) + "\n")
    root = plan_file.read_plan_document(plan_folder)
    if (profile := profile_if_found(root, plan_file.plan_file(plan_folder))) is not None:
        print_warning(profile, cluster_from_json(root["cluster"]), as_json=as_json)
    if as_json:
        print_json(simulated.report.to_json())
        return
    print_answer(simulation_parts(simulated, answer_width()), fold=True)
    engine = root.get("data_parallel")
    if engine is not None and engine.value in ("fsdp", "hsdp"):
        print_line("Gathering weights and reducing gradients are drawn as part of the passes.")
    if trace_file is not None:
        note(f"written: {trace_file} (open it at ui.perfetto.dev)")
