"""`pipeplan check PLAN`: verify the cost, the feasibility and the proof that a plan states."""

from __future__ import annotations

from pathlib import Path

import click

from pipeplan.checker.document import FORMAT, VERSION
from pipeplan.checker.verify import verify_plan
from pipeplan.cli.options import json_option, plan_profile_option, quiet_option
from pipeplan.cli.output import print_json, print_line
from pipeplan.cli.problem_options import profile_of_plan
from pipeplan.errors import InputError
from pipeplan.util.files import read_document
from pipeplan.util.text import one_line


@click.command("check")
@click.argument("plan", type=click.Path(path_type=Path), default=Path("plan"))
@plan_profile_option
@json_option
@quiet_option
def command(plan: Path, profile_file: Path | None, as_json: bool) -> None:
    """Check PLAN, a plan.json or a folder with one (default: ./plan), without the solvers that made it.

    The structure and the cost that the plan states are derived again from the profile and the cluster. If plan.json
    holds a certificate, the proof that no plan is faster is checked too.

    \b
    pipeplan check
    pipeplan check plan/plan.json --profile profile.json
    """
    path = plan / "plan.json" if plan.is_dir() else plan
    root = read_document(path, FORMAT, VERSION)
    findings = verify_plan(root, profile_of_plan(root, path, profile_file))
    if as_json:
        print_json([{"what": one.what, "holds": one.holds, "text": one.text} for one in findings])
    else:
        for finding in findings:
            print_line(one_line(finding.line))
    wrong = [finding for finding in findings if finding.holds is False]
    if wrong:
        raise InputError(f"{path} is wrong: {wrong[0].what}: {wrong[0].text}")
