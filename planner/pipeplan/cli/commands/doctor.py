"""`pipeplan doctor [PLAN]`: say in plain words what is installed on this machine and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import RenderableType
from rich.text import Text

from pipeplan.cli.options import PATH, json_option, quiet_option
from pipeplan.cli.output import print_answer, print_json
from pipeplan.cli.servers import examine_servers, run_on_hosts
from pipeplan.cli.solving import read_profile
from pipeplan.errors import InputError
from pipeplan.first_steps.doctor import MISSING, OK, WARNING, DoctorFinding, examine_machine, run_self_test

LACKING = 2
"""Exit code if something that is needed is missing."""
STYLES = {OK: "green", WARNING: "yellow", MISSING: "bold red"}


@click.command("doctor")
@click.argument("plan", required=False, metavar="[PLAN]", type=PATH)
@click.option(
    "--selftest", is_flag=True, help="Train small plans on this machine's workers as well, for one or two minutes."
)
@click.option(
    "--hosts",
    type=PATH,
    metavar="FILE",
    help="Measure the hosts that this file names, one a line, by ssh, and say what makes training on them slow.",
)
@click.option(
    "--servers",
    type=int,
    metavar="N",
    help="Measure as one of N servers, each of which has NODE_RANK, MASTER_ADDR and MASTER_PORT set.",
)
@click.option(
    "--workers",
    type=int,
    metavar="N",
    help="Start this number of workers on each server  [default: one for each device]",
)
@click.option(
    "--profile", type=PATH, help="Use the model of this profile  [default: ./profile.json, or a bundled VGG-16]"
)
@json_option
@quiet_option
def command(
    plan: Path | None,
    selftest: bool,
    hosts: Path | None,
    servers: int | None,
    workers: int | None,
    profile: Path | None,
    as_json: bool,
) -> int:
    """Say in plain words what is installed on this machine, what is missing, what needs it, and what to do.

    With PLAN, a plan folder, also say whether this machine can run its part of the plan. Nothing is changed; the checks
    take some seconds. The exit code is 2 if something that is needed is missing.

    With --selftest, also run small plans here: with every schedule and every transport, compared with one process, and
    with a worker that is killed. The self-test also measures the speed of messages. On GPUs it records the transport
    for launch.sh.

    With --hosts or --servers, measure several servers for about a minute: their speed, their clocks, and their links,
    in each direction and all at once. Ten lines report the throughput of data parallelism on one server and on all,
    what limits it, and what would be faster.

    \b
    pipeplan doctor
    pipeplan doctor plan
    pipeplan doctor --selftest
    pipeplan doctor --hosts hosts.txt --profile profile.json
    """
    if hosts is not None or servers is not None:
        if plan is not None or selftest:
            raise InputError("--hosts and --servers measure servers: leave out the plan and --selftest")
        _examine_servers(hosts, servers, workers, profile, as_json)
        return 0
    if workers is not None or profile is not None:
        raise InputError("--workers and --profile go with --hosts or --servers")
    findings = examine_machine(plan) + (run_self_test() if selftest else [])
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        print_answer(_finding_lines(findings))
    return LACKING if any(finding.state == MISSING for finding in findings) else 0


def _examine_servers(
    hosts: Path | None, servers: int | None, workers: int | None, profile: Path | None, as_json: bool
) -> None:
    if hosts is not None and servers is not None:
        raise InputError("give --hosts, which starts the servers by ssh, or --servers on each of them, not both")
    if servers is not None and servers < 2:
        raise InputError(f"--servers takes 2 or more, not {servers}: with one there is nothing to compare")
    source = read_profile(profile)
    if hosts is None:
        assert servers is not None
        examine_servers(source.profile, servers, workers, as_json)
        return
    # A bundled profile has the same name on all hosts.
    path = profile.resolve() if profile is not None and profile.exists() else profile
    named = {"--workers": workers, "--profile": path}
    words = [word for name, value in named.items() if value is not None for word in (name, str(value))]
    run_on_hosts(hosts, [*words, *["--json"] * as_json])


def _finding_lines(findings: list[DoctorFinding]) -> Iterator[RenderableType]:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        state, style = finding.state, STYLES[finding.state]
        yield Text.assemble((f"{state:8}", style), f"{finding.name:{width}}  {finding.found}")
        if state != OK:
            yield f"{'':{width + 10}}needed for {finding.needed_for}: {finding.todo}"
    missing = [finding.name for finding in findings if finding.state == MISSING]
    yield f"\nMissing: {', '.join(missing)}." if missing else "\nNothing that is needed is missing."
