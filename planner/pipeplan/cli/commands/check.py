"""`pipeplan check PLAN`: verify the cost, the feasibility and the proof that a plan states."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from pipeplan.checker.claims import TOLERANCE
from pipeplan.checker.document import FORMAT, VERSION
from pipeplan.checker.verify import NO_CERTIFICATE, check_plan
from pipeplan.cli.options import PATH, json_option, plan_profile_option, quiet_option
from pipeplan.cli.output import print_json, print_line, print_warning
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.errors import InputError
from pipeplan.problem.plan_profile import profile_of_plan
from pipeplan.util.files import read_document
from pipeplan.util.text import one_line
from pipeplan.util.units import parse_share


@click.command("check")
@click.argument("plan", type=PATH, default=Path("plan"))
@plan_profile_option
@click.option("--require-proof", is_flag=True, help="Refuse a plan that plan.json does not show to be optimal.")
@click.option("--within", metavar="1%", help="With --require-proof, accept a gap that is shown to be at most this.")
@json_option
@quiet_option
def command(plan: Path, profile_file: Path | None, require_proof: bool, within: str | None, as_json: bool) -> None:
    """Check PLAN, a plan.json or a folder with one (default: ./plan), without the solvers that made it.

    Every figure in plan.json is derived again from the profile and the cluster. Only a certificate in plan.json can
    show that no plan of the searched space is faster. Without a certificate, plan.json only states that the plan is the
    best.

    \b
    pipeplan check
    pipeplan check plan/plan.json --profile profile.json
    pipeplan check plan --require-proof
    """
    if within is not None and not require_proof:
        raise InputError("--within goes with --require-proof")
    most = TOLERANCE if within is None else parse_share(within, "--within")
    path = plan / "plan.json" if plan.is_dir() else plan
    root = read_document(path, FORMAT, VERSION)
    profile = profile_of_plan(root, path, profile_file)
    checked = check_plan(root, profile)
    print_warning(profile, cluster_from_json(root["cluster"]), as_json=as_json)
    if as_json:
        print_json(msgspec.to_builtins(checked.document(str(path))))
    else:
        for finding in checked.results:
            print_line(one_line(finding.line))
    if (wrong := checked.wrong) is not None:
        raise InputError(f"{path} is wrong: {wrong.what}: {wrong.text}")
    if require_proof and checked.shown is None:
        raise InputError(f"{path} is not shown to be optimal: {NO_CERTIFICATE}")
    if require_proof and checked.shown is not None and checked.shown.gap > max(most, TOLERANCE):
        raise InputError(f"{path} is not shown to be optimal: {checked.shown.text}")
