"""`pipeplan replay`: run a plan on emulated servers of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

from pipeplan.cli.given import profile_of_plan
from pipeplan.cli.options import json_option, quiet_option
from pipeplan.emulate import show, show_fault
from pipeplan.emulate.fault_run import replay_fault
from pipeplan.emulate.prepared import Prepared
from pipeplan.emulate.run import SECONDS, Settings, replay
from pipeplan.emulate.watching import minibatches_done
from pipeplan.errors import InputError
from pipeplan.files import read_document
from pipeplan.profile_data import Profile
from pipeplan.simulation.scenario import FORMAT, VERSION

NOT_AS_PROMISED = 1


@click.command("replay")
@click.argument("plan_folder", type=click.Path(path_type=Path), default=Path("plan"))
@click.option("--profile", type=click.Path(path_type=Path), help="The profile that the plan was made from.")
@click.option(
    "--seconds", type=click.FloatRange(1, 3600), default=SECONDS, show_default=True, help="Seconds of training."
)
@click.option(
    "--fault",
    metavar="KIND[:WHERE][@WHEN]",
    help="cut:server1, flap:server1:3s, kill:worker3 or freeze:worker3, after @20 minibatches or @5s.",
)
@click.option(
    "--timeout", type=click.FloatRange(1, 3600), help="With --fault: the executor's --timeout.  [default: 10 and more]"
)
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep the run folder and logs there.")
@json_option
@quiet_option
def command(
    plan_folder: Path,
    profile: Path | None,
    seconds: float,
    fault: str | None,
    timeout: float | None,
    keep: Path | None,
    as_json: bool,
) -> int:
    """Run the plan in PLAN_FOLDER (./plan unless given) on emulated servers. Messages and all-reduces are real and go
    through shaped links; workers sleep for the profile's times instead of computing. Linux only; most machines need no
    root.

    With --fault the plan's launchers run it, the fault comes in the middle, and the answer is whether they kept the
    executor's promises; the exit status is 1 if not.

    \b
    pipeplan replay
    pipeplan replay plan --seconds 60 --json
    pipeplan replay plan --fault kill:worker1@20
    """
    if timeout is not None and fault is None:
        raise InputError("--timeout is for a replay with a --fault: give one, or leave it out")
    layers = _profile(plan_folder, profile)
    with _progress() as watch:
        if fault is not None:
            broken = replay_fault(plan_folder, layers, fault, seconds, timeout, keep, watch)
        else:
            replayed = replay(plan_folder, layers, Settings(seconds, keep), watch)
    console = Console(highlight=False, markup=False)
    if as_json:
        answer = replayed.to_json() if fault is None else broken.to_json()
        click.echo(json.dumps(answer, indent=1, allow_nan=False, ensure_ascii=False))
    elif fault is None:
        show.show(replayed, console)
    else:
        show_fault.show(broken, console)
    return 0 if fault is None or broken.kept else NOT_AS_PROMISED


@contextmanager
def _progress() -> Iterator[Callable[[Path, Prepared], None]]:
    """Show the progress of the replay on stderr, if that is a terminal."""
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield lambda room, ready: None
        return
    with console.status("getting ready") as status:

        def watch(room: Path, ready: Prepared) -> None:
            done = minibatches_done(room / "run")
            workers = sum(len(part.workers) for part in ready.servers.leaves)
            training = f"{ready.plan.config}: {done} of {ready.minibatches} minibatches"
            status.update(f"starting {workers} workers" if done is None else training)

        yield watch


def _profile(folder: Path, given: Path | None) -> Profile | None:
    """The profile of the plan. None where there is none; stages are then replayed as one layer each."""
    plan = folder / "plan.json"
    if not plan.is_file():
        return None  # the replay itself reports this
    root = read_document(plan, FORMAT, VERSION)
    try:
        return profile_of_plan(root, plan, given)
    except InputError:
        if given is not None:
            raise
        return None
