"""`python -m pipeplan_launch.preflight PLAN_FOLDER …`: checks before the workers start. launch.sh runs it first.

It checks the run's stage files, options and folders, and compares this machine's devices with the devices that one
server of the plan needs. It prints the number of workers to start. Workers take seconds to start, and an obvious
mistake should be reported before that. Torch is imported only for a plan on GPUs.

The launch does not have to know which server of the plan this machine is: ranks are assigned when all processes have
started (`pipeplan_launch.rank_mapping`). The number of workers to start is the first of these that is known: WORKERS;
the size of the servers, if all have the same; the number of GPUs of this machine, if a server of the plan has that
size; the size of server NODE_RANK.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeplan_launch.checkpoint import checkpoint
from pipeplan_launch.command_line import (
    averaging_options,
    check_start_options,
    compile_backend,
    staleness_options,
    worker_parser,
)
from pipeplan_launch.elastic.handshake import check_secret
from pipeplan_launch.errors import LaunchError, listed, print_status
from pipeplan_launch.files import explain_errors
from pipeplan_launch.job_reference import choice_note, file_of
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.run_options import (
    MODES,
    asks_self_test,
    check_averaging_options,
    check_staleness_options,
    transport_of,
)
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.telemetry import run_folder
from pipeplan_launch.torch_check import version_problem
from pipeplan_launch.typed_document import shortened, whole_number

MIN_FREE_BYTES = 2**20
"""Free space below which a run folder is refused."""
SELF_TEST_S = 90.0
"""Seconds after which the self-test before a first run on GPUs is ended."""
REQUIRED_VARIABLES = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that each launch must have, if a run has several launches."""


def check_run_start(options: Namespace, plan: LaunchPlan, environment: Mapping[str, str]) -> None:
    """Raise `LaunchError` for options or folders with which a run cannot begin."""
    check_start_options(options.resume, options.resume_from, options.weights, trains=plan.mode == "training")
    check_staleness_options(staleness_options(options), plan)
    check_averaging_options(averaging_options(options, plan), plan, compile_backend(options))
    transport_of(options.transport, plan, averaging_options(options, plan))
    if environment.get("NODE_RANK", "0") != "0":
        return  # only the first launch uses the folders
    run = options.run_dir or options.plan_folder / "runs"
    with explain_errors(run, "reading"):
        if options.resume:
            run_folder.run_to_resume(options.plan_folder, options.run_dir)
        elif options.run_dir is not None:
            run_folder.check_folder_is_free(options.run_dir)
    if not options.resume:
        for start in filter(None, (options.resume_from, options.weights)):
            with explain_errors(start, "reading"):
                checkpoint.find_checkpoint(start)
        _check_room(run)


def check_job(plan: LaunchPlan) -> str | None:
    """A note for the user on the file of the job, or None. Raises `LaunchError` if there is no file."""
    file = file_of(plan.model_ref)
    if file is not None and not plan.emulated and not file.is_file():
        places = list(dict.fromkeys([str(file), *([plan.model_file.path] if plan.model_file else [])]))
        raise LaunchError(
            f"the plan's job is not at {', nor at '.join(places)}: put it there, or profile and solve again"
        )
    note = choice_note(plan.model_ref, plan.model_file)
    return f"note: {note}" if note else None


def _check_room(run: Path) -> None:
    """Raise `LaunchError` if the disk is full or the folder cannot be written to."""
    with explain_errors(run, "writing the run folder"):
        if any(place.exists() and not place.is_dir() for place in (run, *run.parents)):
            raise LaunchError(f"{run} cannot be a folder, because it or a parent is a file: choose another --run-dir")
        existing = next(place for place in (run, *run.absolute().parents) if place.is_dir())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(MIN_FREE_BYTES))
            file.flush()


def gpus() -> int:
    """Number of CUDA devices of this machine. Raises `LaunchError` if torch cannot be imported."""
    try:
        importlib.import_module("torch")
        from pipeplan_launch.devices.backend import cuda_devices
    except (ImportError, OSError) as error:
        raise LaunchError(f"running a plan needs torch, and importing it failed: {error}") from error
    return cuda_devices()


def check_machine(plan: LaunchPlan, environment: Mapping[str, str], core_count: int, gpu_count: int) -> str | None:
    """A note for the user, or None. Raises `LaunchError` if the plan cannot run on this machine."""
    launches = _number(environment, "NNODES") or plan.servers
    workers = workers_to_start(plan, environment, gpu_count)
    advice = f"for this machine: pipeplan solve --cluster local --workers {gpu_count or max(1, core_count)}"
    if plan.device == "cuda" and gpu_count < workers:
        raise LaunchError(
            f"the plan needs {_count(workers, 'CUDA device')}{_place_text(plan, environment)}, and this machine has "
            f"{gpu_count or 'none'}; {advice}"
        )
    if launches > 1:
        missing = [name for name in REQUIRED_VARIABLES if not environment.get(name)]
        if missing:
            requirement = f"NNODES is {launches}: run launch.sh {launches} times"
            if launches == plan.servers:
                each = (
                    f"{listed(plan.server_sizes)} workers"
                    if plan.server_sizes
                    else _count(plan.workers_per_server, "worker")
                )
                requirement = f"the plan spans {plan.servers} servers of {each}: run launch.sh on each"
            raise LaunchError(
                f"{requirement} with NODE_RANK=0 to {launches - 1}, and MASTER_ADDR and MASTER_PORT of server 0 "
                f"(not set: {', '.join(missing)}); {advice}"
            )
        node, port = environment["NODE_RANK"], environment["MASTER_PORT"]
        number = whole_number(node)
        if number is None or number >= launches:
            raise LaunchError(f"NODE_RANK is {shortened(node)}: it must be this server's number, 0 to {launches - 1}")
        if not 0 < (whole_number(port) or 0) < 1 << 16:
            raise LaunchError(f"MASTER_PORT is {shortened(port)}: it must be a free port, 1024 to 65535")
        _check_interface(environment)
        check_secret(environment)
    elif environment.get("NODE_RANK", "0") != "0":
        other = shortened(environment["NODE_RANK"])
        raise LaunchError(f"NODE_RANK is {other}, and the plan uses one server only: run launch.sh there, once")
    elif workers != plan.world:
        raise LaunchError(
            f"the plan has {_count(plan.world, 'worker')}, and this launch alone would start {workers}: set WORKERS to "
            "the number that this launch starts, and NNODES to the number of launches"
        )
    if plan.device == "cpu" and workers > core_count:
        return (
            f"note: {workers} workers share {_count(core_count, 'core')}; only the prediction of a plan for "
            "`--cluster local` allows for that"
        )
    return None


def workers_to_start(plan: LaunchPlan, environment: Mapping[str, str], gpu_count: int) -> int:
    """Number of workers to start on this machine; the size of the largest server if this machine's server is not known.

    Raises `LaunchError` for a wrong value of WORKERS.
    """
    wanted = _number(environment, "WORKERS")
    if wanted is not None:
        if wanted > plan.world:
            raise LaunchError(f"WORKERS is {wanted}: the whole plan has {_count(plan.world, 'worker')}")
        return wanted
    if not plan.server_sizes:
        return plan.workers_per_server
    if plan.device == "cuda" and gpu_count in plan.server_sizes:
        return gpu_count
    node = environment.get("NODE_RANK", "")
    number = whole_number(node)
    return plan.workers_on(number) if number is not None and number < plan.servers else plan.workers_per_server


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not (number := whole_number(text)):
        raise LaunchError(f"{name} is {shortened(text)}: it must be a whole number of at least 1")
    return number


def _place_text(plan: LaunchPlan, environment: Mapping[str, str]) -> str:
    if environment.get("WORKERS"):
        return " on this machine (by WORKERS)"
    if plan.server_sizes:
        node = environment.get("NODE_RANK")
        return f" on server {node}" if node else " on its largest server"
    return f" on each of its {plan.servers} servers" if plan.servers > 1 else ""


def _check_interface(environment: Mapping[str, str]) -> None:
    """Raise `LaunchError` if GLOO_SOCKET_IFNAME names a network interface that this machine does not have."""
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, environment.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in there:
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME names {name!r}, and this machine's network interfaces are {listed(there)}: set it "
                "to the one by which the servers reach each other, or unset it"
            )


def self_test_note(options: Namespace, plan: LaunchPlan, gpu_count: int) -> str | None:
    """Run the self-test of messages between GPUs, unless its result is known or not needed. Returns a note."""
    averaging = averaging_options(options, plan)
    if options.no_selftest or gpu_count < 2 or not asks_self_test(options.transport, plan, averaging):
        return None
    from pipeplan_launch.devices.selftest_cache import remembered_transport

    if remembered_transport(MODES) is not None:
        return None
    command = [sys.executable, "-m", "pipeplan_measure.selftest", "--short"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SELF_TEST_S, check=False)
        report = json.loads(done.stdout.strip().splitlines()[-1])
        failed = [f"{one['name']}: {one['text']}" for one in report["results"] if not one["passed"]]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, KeyError):
        return "note: the self-test gave no answer, so messages between stages travel through the host's memory"
    why = f" ({'; '.join(failed)})" if failed else ""
    return f"note: messages between stages will travel by --transport {report['transport']}{why}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, which is 2 if the plan cannot run on this machine."""
    # Parses the workers' options too, so that --help and mistakes are printed once, and before workers start.
    options = worker_parser(prog="launch.sh").parse_args(arguments)
    try:
        plan = load_plan(options.plan_folder)
        if problem := version_problem():  # the workers report later if torch cannot be imported
            raise LaunchError(f"running a plan needs torch: {problem[0]}; {problem[1]}")
        job_note = check_job(plan)
        gpu_count = gpus() if plan.device == "cuda" else 0
        note = check_machine(plan, os.environ, len(os.sched_getaffinity(0)), gpu_count)
        check_run_start(options, plan, os.environ)
        tested = self_test_note(options, plan, gpu_count)
        print(workers_to_start(plan, os.environ, gpu_count))
    except LaunchError as error:
        print_status(f"error: {error}")
        return 2
    for line in filter(None, (job_note, note, tested)):
        print_status(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
