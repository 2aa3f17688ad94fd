"""`pipeplan doctor [PLAN]`: say in plain words what is installed on this machine and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import RenderableType
from rich.text import Text

from pipeplan.cli.options import PATH, json_option, quiet_option
from pipeplan.cli.output import print_answer, print_json
from pipeplan.first_steps.doctor import MISSING, OK, WARNING, DoctorFinding, examine_machine, run_self_test

LACKING = 2
"""The exit code if something that is needed is missing."""
STYLES = {OK: "green", WARNING: "yellow", MISSING: "bold red"}


@click.command("doctor")
@click.argument("plan", required=False, metavar="[PLAN]", type=PATH)
@click.option(
    "--selftest", is_flag=True, help="Train small plans on this machine's workers as well, for one or two minutes."
)
@json_option
@quiet_option
def command(plan: Path | None, selftest: bool, as_json: bool) -> int:
    """Say in plain words what is installed on this machine, what is missing, what needs it, and what to do.

    With PLAN, a plan folder, also say whether this machine can run its part of the plan. Nothing is changed; the checks
    take some seconds. The exit code is 2 if something that is needed is missing.

    With --selftest, also run small plans here: every schedule and every transport, compared with one process; a worker
    that is killed; the speed of messages. On GPUs it remembers which transport launch.sh is to use.

    \b
    pipeplan doctor
    pipeplan doctor plan
    pipeplan doctor --selftest
    """
    findings = examine_machine(plan) + (run_self_test() if selftest else [])
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        print_answer(_finding_lines(findings))
    return LACKING if any(finding.state == MISSING for finding in findings) else 0


def _finding_lines(findings: list[DoctorFinding]) -> Iterator[RenderableType]:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        state, style = finding.state, STYLES[finding.state]
        yield Text.assemble((f"{state:8}", style), f"{finding.name:{width}}  {finding.found}")
        if state != OK:
            yield f"{'':{width + 10}}needed for {finding.needed_for}: {finding.todo}"
    missing = [finding.name for finding in findings if finding.state == MISSING]
    yield f"\nMissing: {', '.join(missing)}." if missing else "\nNothing that is needed is missing."
