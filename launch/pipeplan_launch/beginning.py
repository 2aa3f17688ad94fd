"""What can be said of a run before its workers are started: what it begins from, and where it is written. Torch-free.

Workers take seconds to start. What ends a run at once should not wait for them.
"""

from __future__ import annotations

import socket
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from pipeplan_launch import checkpoint, runfolder
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors
from pipeplan_launch.torch_here import lacking

LEAST_BYTES = 2**20
"""What a run folder takes at the very least."""


def check(given: Namespace, plan: LaunchPlan, environment: Mapping[str, str], launches: int) -> None:
    """Raises `LaunchError` for options, folders or ports with which no run can begin."""
    check_choice(given.resume, given.resume_from, given.weights, plan)
    if environment.get("NODE_RANK", "0") != "0":
        return  # folders and port are the first launch's
    run = given.run_dir or given.plan_folder / "runs"
    with explain_errors(run, "reading"):
        if given.resume:
            runfolder.run_to_resume(given.plan_folder, given.run_dir)
        elif given.run_dir is not None:
            runfolder.refuse_taken(given.run_dir)
    if not given.resume:
        for start in filter(None, (given.resume_from, given.weights)):
            with explain_errors(start, "reading"):
                checkpoint.at(start)
        _check_room(run)
    if launches > 1:  # else they meet at a port that is found
        _check_port(environment)


def check_torch() -> None:
    """Raises `LaunchError` where there is no torch that will do. That it can be imported is seen later."""
    if why := lacking():
        raise LaunchError(f"running a plan needs torch: {why[0]}; {why[1]}")


def check_choice(resume: bool, resume_from: Path | None, weights: Path | None, plan: LaunchPlan) -> None:
    """Raises `LaunchError` where a run would begin from more than one thing, or cannot go on at all."""
    given = {"--resume": resume, "--resume-from": resume_from, "--weights": weights}
    chosen = [name for name, value in given.items() if value]
    if len(chosen) > 1:
        raise LaunchError(f"{' and '.join(chosen)} exclude each other: a run begins from one of them")
    if plan.mode != "training" and (resume or resume_from is not None):
        raise LaunchError(f"inference has nothing to go on with: give --weights in place of {chosen[0]}")


def _check_room(run: Path) -> None:
    """A full disk, and a folder of somebody else, are said now."""
    with explain_errors(run, "writing the run folder"):
        if any(place.exists() and not place.is_dir() for place in (run, *run.parents)):
            raise LaunchError(f"{run} is not a folder, nor can it be made one: choose another --run-dir")
        there = next(place for place in (run, *run.absolute().parents) if place.is_dir())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(LEAST_BYTES))
            file.flush()


def _check_port(environment: Mapping[str, str]) -> None:
    """Where the first launch of several opens the port that all meet at."""
    text = environment.get("MASTER_PORT", "")
    if not environment.get("NODE_RANK") or not text:
        return
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise LaunchError(f"MASTER_PORT is {text!r}: it must be a free port, 1024 to 65535")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as port:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("", int(text)))
    except OSError as error:
        raise LaunchError(
            f"MASTER_PORT {text} cannot be used on this machine ({error.strerror}): give all launches another one"
        ) from error
