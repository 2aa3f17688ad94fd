"""`pipeplan check PLAN`: is a plan what it says it is?"""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeplan.check.document import FORMAT, VERSION
from pipeplan.check.verify import verify
from pipeplan.cli.given import profile_of_plan
from pipeplan.cli.options import json_option, quiet_option
from pipeplan.errors import InputError
from pipeplan.files import read_document
from pipeplan.text import one_line


@click.command("check")
@click.argument("plan", type=click.Path(path_type=Path), default=Path("plan"))
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="What the plan was made from  [default: found beside the plan, here, or among the bundled ones]",
)
@json_option
@quiet_option
def command(plan: Path, profile_file: Path | None, as_json: bool) -> None:
    """Check PLAN, a plan.json or a folder with one (./plan unless given), without the solvers that made it.

    Its structure and its stated cost are derived again from the profile and the cluster. Where plan.json holds a
    certificate, so is the proof that no plan is faster.

    \b
    pipeplan check
    pipeplan check plan/plan.json --profile profile.json
    """
    path = plan / "plan.json" if plan.is_dir() else plan
    root = read_document(path, FORMAT, VERSION)
    findings = verify(root, profile_of_plan(root, path, profile_file))
    if as_json:
        entries = [{"what": found.what, "holds": found.holds, "text": found.text} for found in findings]
        click.echo(json.dumps(entries, indent=1, ensure_ascii=False))
    else:
        for found in findings:
            click.echo(one_line(found.line))
    wrong = [found for found in findings if found.holds is False]
    if wrong:
        raise InputError(f"{path} does not hold: {wrong[0].what}: {wrong[0].text}")
