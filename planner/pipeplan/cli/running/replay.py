"""`pipeplan replay`: run a plan on servers that are emulated on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from pipeplan.cli.shared.options import NumberRange, json_option, quiet_option
from pipeplan.cli.shared.output import answer_console, is_watched, print_json, status
from pipeplan.cli.shared.plan_completion import complete_fault
from pipeplan.errors import InputError
from pipeplan.problem.plan_profile import profile_of_plan
from pipeplan.profile_data.profile import Profile
from pipeplan.replay import terminal
from pipeplan.replay.fault_run import replay_fault
from pipeplan.replay.run import SECONDS, PreparedReplay, ReplaySettings, minibatches_done, replay_plan
from pipeplan.simulation.scenario import FORMAT, VERSION
from pipeplan.util.files import read_document

NOT_AS_PROMISED = 1


@click.command("replay")
@click.argument("plan_folder", type=click.Path(path_type=Path), default=Path("plan"))
@click.option("--profile", type=click.Path(path_type=Path), help="The profile that the plan was made from.")
@click.option("--seconds", type=NumberRange(1, 3600), default=SECONDS, show_default=True, help="Duration of the run.")
@click.option(
    "--fault",
    metavar="KIND[:WHERE][@WHEN]",
    shell_complete=complete_fault,
    help="Inject a fault: cut:server1, flap:server1:3s, kill:worker3 or freeze:worker3, after @20 minibatches or @5s.",
)
@click.option(
    "--timeout",
    type=NumberRange(1, 3600),
    help="With --fault: the executor's --timeout in seconds  [default: at least 10]",
)
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep the run folder and logs in DIR.")
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
    """Run the plan in PLAN_FOLDER (default: ./plan) on emulated servers of this machine.

    Messages and all-reduces are real and pass through shaped links; computation is replaced by sleeping as long as the
    profile says. Linux only; most machines need no root.

    With --fault the plan's launchers run it, and a fault strikes in the middle. The answer says whether the launchers
    reacted as the executor promises; the exit code is 1 if they did not.

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
            replayed = replay_plan(plan_folder, layers, ReplaySettings(seconds, keep), watch)
    if as_json:
        print_json(replayed.to_json() if fault is None else broken.to_json())
    elif fault is None:
        terminal.show_replay(replayed, answer_console())
    else:
        terminal.show_fault_replay(broken, answer_console())
    return 0 if fault is None or broken.kept else NOT_AS_PROMISED


@contextmanager
def _progress() -> Iterator[Callable[[Path, PreparedReplay], None]]:
    """Show on standard error how far the replay is; only in terminals, because counting minibatches reads files."""
    with status("getting ready") as show_status:
        watched = is_watched()

        def watch(scratch: Path, ready: PreparedReplay) -> None:
            if not watched:
                return
            done = minibatches_done(scratch / "run")
            workers = sum(len(part.workers) for part in ready.servers.leaves)
            training = f"{ready.plan.config}: {done} of {ready.minibatches} minibatches"
            show_status(f"starting {workers} workers" if done is None else training)

        yield watch


def _profile(folder: Path, named: Path | None) -> Profile | None:
    """The plan's profile, or None if it is not found; then each stage is replayed as one layer."""
    plan = folder / "plan.json"
    if not plan.is_file():
        return None  # the replay itself raises the error for a missing plan
    root = read_document(plan, FORMAT, VERSION)
    try:
        return profile_of_plan(root, plan, named)
    except InputError:
        if named is not None:
            raise
        return None
