"""`pipeplan replay`: run a plan on emulated servers of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from pipeplan.cli.given import profile_of_plan
from pipeplan.emulate import show
from pipeplan.emulate.run import SECONDS, Settings, replay
from pipeplan.errors import InputError
from pipeplan.files import read_document
from pipeplan.profile import Profile
from pipeplan.simulate.scenario import FORMAT, VERSION


@click.command("replay")
@click.argument("plan_folder", type=click.Path(path_type=Path), default=Path("plan"))
@click.option("--profile", type=click.Path(path_type=Path), help="The profile that the plan was made from.")
@click.option("--seconds", type=click.FloatRange(1, 3600), default=SECONDS, show_default=True, help="How long to run.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep the run folder and logs there.")
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
def command(plan_folder: Path, profile: Path | None, seconds: float, keep: Path | None, as_json: bool) -> None:
    """Run the plan in PLAN_FOLDER (./plan unless given) on emulated servers: real messages and all-reduces through
    shaped links, computing as long as the profile says, by sleep. Linux only; no root needed on most machines.

    \b
    pipeplan replay
    pipeplan replay plan --seconds 60 --json
    """
    layers = _profile(plan_folder, profile)
    replayed = replay(plan_folder, layers, Settings(seconds, keep))
    if as_json:
        click.echo(json.dumps(replayed.to_json(), indent=1, allow_nan=False, ensure_ascii=False))
        return
    show.show(replayed, Console(highlight=False, markup=False))


def _profile(folder: Path, given: Path | None) -> Profile | None:
    """Where none is found, stages are replayed as one layer each."""
    plan = folder / "plan.json"
    if not plan.is_file():
        return None  # which is complained of later
    root = read_document(plan, FORMAT, VERSION)
    try:
        return profile_of_plan(root, plan, given)
    except InputError:
        if given is not None:
            raise
        return None
