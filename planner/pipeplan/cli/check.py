"""`pipeplan check PLAN`: is a plan what it says it is?"""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeplan import resources
from pipeplan.check.document import FORMAT, VERSION
from pipeplan.check.verify import verify
from pipeplan.errors import InputError
from pipeplan.files import Node, read_document
from pipeplan.profile import Profile
from pipeplan.text import one_line


@click.command("check")
@click.argument("plan", type=click.Path(path_type=Path), default=Path("plan"))
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="What the plan was made from  [default: found beside the plan, here, or among the bundled ones]",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
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
    findings = verify(root, _profile(root, path, profile_file))
    if as_json:
        entries = [{"what": found.what, "holds": found.holds, "text": found.text} for found in findings]
        click.echo(json.dumps(entries, indent=1, ensure_ascii=False))
    else:
        for found in findings:
            click.echo(one_line(found.line))
    wrong = [found for found in findings if found.holds is False]
    if wrong:
        raise InputError(f"{path} does not hold: {wrong[0].what}: {wrong[0].text}")


def _profile(root: Node, plan: Path, given: Path | None) -> Profile:
    """The profile with the digest that the plan names, scaled to the plan's minibatch."""
    digest, minibatch = root["profile"]["digest"].text(), root["profile"]["minibatch"].integer(minimum=1)
    if given is not None:
        profile = _scaled(given, minibatch)
        if profile.digest() != digest:
            raise InputError(f"{given} is not the profile that {plan} was made from: their digests differ")
        return profile
    near = [plan.parent / "profile.json", plan.parent.parent / "profile.json", Path("profile.json")]
    for path in [*near, *sorted(resources.folder("profiles").glob("*.json"))]:
        if path.is_file() and (profile := _scaled(path, minibatch)).digest() == digest:
            return profile
    raise InputError(f"the profile that {plan} was made from is not beside it: name it with --profile")


def _scaled(path: Path, minibatch: int) -> Profile:
    profile = Profile.load(path)
    return profile if profile.minibatch == minibatch else profile.rescaled(minibatch)
