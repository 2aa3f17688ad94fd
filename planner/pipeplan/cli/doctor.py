"""`pipeplan doctor [PLAN]`: what is here, and what is missing, in plain words."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from pipeplan.cli.options import json_option, quiet_option
from pipeplan.doctor.examine import examine
from pipeplan.doctor.finding import MISSING, OK, WARNING, Finding

LACKING = 2
"""The exit code where something needed is missing."""
STYLES = {OK: "green", WARNING: "yellow", MISSING: "bold red"}


@click.command("doctor")
@click.argument("plan", required=False, metavar="[PLAN]", type=click.Path(path_type=Path))
@json_option
@quiet_option
def command(plan: Path | None, as_json: bool) -> int:
    """Say what is here and what is missing, what for, and what to do; with PLAN, a plan's folder, also whether this
    machine can run its part. Looks only; takes some seconds. Exit code 2 where something that is needed is missing.

    \b
    pipeplan doctor
    pipeplan doctor plan
    """
    findings = examine(plan)
    if as_json:
        click.echo(json.dumps([one.to_json() for one in findings], indent=1, ensure_ascii=False))
    else:
        _show(findings)
    return LACKING if any(one.state == MISSING for one in findings) else 0


def _show(findings: list[Finding]) -> None:
    console = Console(highlight=False, markup=False)
    width = max(len(one.name) for one in findings)
    for one in findings:
        head = Text.assemble((f"{one.state:8}", STYLES[one.state]), f"{one.name:{width}}  {one.found}")
        console.print(head, soft_wrap=True)
        if one.state != OK:
            console.print(f"{'':{width + 10}}needed for {one.needed_for}: {one.todo}", soft_wrap=True)
    missing = [one.name for one in findings if one.state == MISSING]
    console.print(f"\nMissing: {', '.join(missing)}." if missing else "\nNothing that is needed is missing.")
