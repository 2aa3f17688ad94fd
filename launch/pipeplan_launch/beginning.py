"""Checks of a run's options, folders and port before its workers are started. Torch-free.

Workers take seconds to start, and a mistake that ends a run at once should not wait for them.
"""

from __future__ import annotations

import socket
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from pipeplan_launch import checkpoint, runfolder
from pipeplan_launch.arguments import check_start_options
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors
from pipeplan_launch.torch_here import lacking

LEAST_BYTES = 2**20
"""Free space below which a run folder is refused."""


def check(options: Namespace, plan: LaunchPlan, environment: Mapping[str, str], launches: int) -> None:
    """Raise `LaunchError` for options, folders or a port with which no run can begin.

    `launches`: number of launch.sh processes that start the run together.
    """
    check_start_options(options.resume, options.resume_from, options.weights, trains=plan.mode == "training")
    if environment.get("NODE_RANK", "0") != "0":
        return  # only the first launch uses the folders and the port
    run = options.run_dir or options.plan_folder / "runs"
    with explain_errors(run, "reading"):
        if options.resume:
            runfolder.run_to_resume(options.plan_folder, options.run_dir)
        elif options.run_dir is not None:
            runfolder.refuse_taken(options.run_dir)
    if not options.resume:
        for start in filter(None, (options.resume_from, options.weights)):
            with explain_errors(start, "reading"):
                checkpoint.at(start)
        _check_room(run)
    if launches > 1:  # a single launch picks a free port by itself
        _check_port(environment)


def check_torch() -> None:
    """Raise `LaunchError` if torch is missing or too old. Whether it can be imported shows only later."""
    if problem := lacking():
        raise LaunchError(f"running a plan needs torch: {problem[0]}; {problem[1]}")


def _check_room(run: Path) -> None:
    """Raise `LaunchError` if the disk is full or the folder cannot be written to."""
    with explain_errors(run, "writing the run folder"):
        if any(place.exists() and not place.is_dir() for place in (run, *run.parents)):
            raise LaunchError(f"{run} is not a folder, nor can it be made one: choose another --run-dir")
        existing = next(place for place in (run, *run.absolute().parents) if place.is_dir())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(LEAST_BYTES))
            file.flush()


def _check_port(environment: Mapping[str, str]) -> None:
    """Raise `LaunchError` if the first launch cannot open MASTER_PORT, through which all launches find each other."""
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
