"""`pipeplan simulate`: replay a plan in simulated time."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeplan.api import simulate
from pipeplan.cli.options import PATH, complete_words, force_option, json_option, quiet_option
from pipeplan.cli.output import answer_console, answer_width, note, print_json, print_line, print_warning
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.errors import InputError
from pipeplan.problem import plan_file
from pipeplan.problem.plan_profile import profile_if_found
from pipeplan.run_data.run_folder import read_run_of_plan
from pipeplan.simulation import terminal
from pipeplan.simulation.message_order import GLOO, TRANSPORTS
from pipeplan.simulation.perfetto import overlaid_document, trace_document
from pipeplan.simulation.simulate import MOST_MINIBATCHES
from pipeplan.util.files import refuse_to_replace, write_text

TRACE_MARK = b'"traceEvents"'
"""The field of a trace by which its file is recognised."""
LATEST = "latest"
"""Value of `--run` for the latest run of the plan."""


@click.command("simulate")
@click.argument("plan_folder", type=PATH, default=Path("plan"))
@click.option(
    "--microbatches",
    type=click.IntRange(1, MOST_MINIBATCHES),
    help="Simulate this number of microbatches  [default: enough for a steady state]",
)
@click.option(
    "--transport",
    metavar="NAME",
    default=GLOO,
    shell_complete=complete_words(*TRANSPORTS),
    help="Send messages between stages as launch.sh does: nccl keeps one order on all workers.",
)
@click.option("--trace", "trace_file", type=PATH, help="Write a trace for Perfetto to this file.")
@force_option
@json_option
@quiet_option
@click.option(
    "--run",
    "run_folder",
    metavar="RUN|latest",
    help="Add the measured timeline of this run, or of the latest one, to the drawing and the trace.",
)
@click.option(
    "--width",
    type=click.IntRange(40, 1000),
    help="Draw the timeline in this number of columns  [default: the terminal's, or 80]",
)
def command(
    plan_folder: Path,
    microbatches: int | None,
    transport: str,
    trace_file: Path | None,
    force: bool,
    as_json: bool,
    run_folder: str | None,
    width: int | None,
) -> None:
    """Replay the plan in PLAN_FOLDER (default: ./plan) in simulated time, with the schedule that the executor runs.

    Open a trace at ui.perfetto.dev or chrome://tracing. An older trace is replaced, any other file only with --force.

    \b
    pipeplan simulate
    pipeplan simulate plan --microbatches 200 --trace trace.json
    pipeplan simulate plan --transport nccl
    pipeplan simulate plan --run latest --trace trace.json
    pipeplan simulate plan --run plan/runs/20260131T120000Z
    """
    if as_json and run_folder is not None and trace_file is None:
        raise InputError("--run adds to the drawing and to a trace, which --json leaves out: leave out --run")
    if trace_file is not None:
        refuse_to_replace(trace_file, "--trace", force=force, mark=TRACE_MARK, what="a trace")
    run = None
    if run_folder is not None:
        run = read_run_of_plan(plan_folder, None if run_folder == LATEST else Path(run_folder))
    simulated = simulate(plan_folder, microbatches, transport=transport)
    plan, replayed, report = simulated.scenario, simulated.replayed, simulated.report
    if trace_file is not None:
        document = trace_document(plan, replayed) if run is None else overlaid_document(plan, run, microbatches)
        write_text(trace_file, json.dumps(document, allow_nan=False) + "\n")
    root = plan_file.read_plan_document(plan_folder)
    if (profile := profile_if_found(root, plan_file.plan_file(plan_folder))) is not None:
        print_warning(profile, cluster_from_json(root["cluster"]), as_json=as_json)
    if as_json:
        print_json(report.to_json())
        return
    terminal.print_simulation(plan, replayed, report, answer_console(), width or answer_width(), run)
    engine = root.get("data_parallel")
    if engine is not None and engine.value in ("fsdp", "hsdp"):
        print_line("Gathering weights and reducing gradients are drawn as part of the passes.")
    if trace_file is not None:
        note(f"written: {trace_file} (open it at ui.perfetto.dev)")
