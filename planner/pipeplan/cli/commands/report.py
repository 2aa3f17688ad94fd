"""`pipeplan report`: one HTML page on a plan and a run of it."""

from __future__ import annotations

from pathlib import Path

import click

from pipeplan.cli.options import PATH, force_option, json_option, output_file, plan_profile_option, quiet_option
from pipeplan.cli.output import note, print_json, print_warning
from pipeplan.errors import InputError
from pipeplan.problem import plan_file
from pipeplan.problem.plan_profile import profile_of_plan
from pipeplan.report.build import build_report, report_page
from pipeplan.report.source import read_report_source
from pipeplan.run_data.run_folder import MeasuredRun, has_runs, read_run_of_plan
from pipeplan.util.files import refuse_to_replace, write_text

REPORT = "report.html"
MARK = b'<meta name="generator" content="pipeplan report">'
"""The line in the head of a page that marks it as a report."""


@click.command("report")
@click.argument("plan_folder", metavar="[PLAN]", type=PATH, default=Path("plan"))
@click.argument("run", required=False, type=PATH)
@output_file(note=f"{REPORT} in the plan's folder")
@force_option
@plan_profile_option
@json_option
@quiet_option
def command(
    plan_folder: Path, run: Path | None, output: Path | None, force: bool, profile_file: Path | None, as_json: bool
) -> None:
    """Write one HTML page that shows PLAN (default: ./plan) beside RUN, the folder of a run (default: the latest).

    An older report is replaced; any other file is replaced only with --force. With --json no file is written.

    \b
    pipeplan report
    pipeplan report plan plan/runs/20260131T120000Z
    pipeplan report plan -o vgg16.html --profile profile.json
    """
    path = plan_file.plan_file(plan_folder)
    target = output or path.parent / REPORT
    root = plan_file.read_plan_document(plan_folder)
    if not as_json:
        refuse_to_replace(target, force=force, mark=MARK, what="a report")
    profile = profile_of_plan(root, path, profile_file)
    source = read_report_source(root, profile)
    measured = _latest_run(path.parent) if run is None else read_run_of_plan(path.parent, run)
    document = build_report(source, measured).to_json()
    print_warning(profile, source.problem.cluster, as_json=True)
    if as_json:
        print_json(document, indent=None)
        return
    write_text(target, report_page(document))
    note(f"written: {target}")


def _latest_run(folder: Path) -> MeasuredRun | None:
    """The latest run of the plan; None if it cannot be read. A note names the run, or the reason."""
    if not has_runs(folder):
        return None
    try:
        measured = read_run_of_plan(folder)
    except InputError as error:
        note(f"without a run: {error}")
        return None
    note(f"run: {measured.folder}, the latest", dim=True)
    return measured
