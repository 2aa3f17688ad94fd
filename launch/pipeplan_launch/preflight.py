"""`python -m pipeplan_launch.preflight PLAN_FOLDER …`: checks whether this machine can run its part of the plan.

launch.sh runs it first. It checks the stage files, compares the devices of this machine with those that one server of
the plan needs, and prints the number of workers to start. Torch is imported only for a plan on GPUs.

The launch need not know which server of the plan this machine is: ranks are assigned when all processes have started
(`pipeplan_launch.placement`). The number of workers to start is the first of these that is known: WORKERS; the size of
the servers, if all have the same; the number of GPUs of this machine, if a server of the plan has that size; the size
of server NODE_RANK.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from pipeplan_launch import beginning
from pipeplan_launch.arguments import parser
from pipeplan_launch.config import LaunchPlan, load_plan
from pipeplan_launch.errors import LaunchError, listed

NEEDED = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """Number of CUDA devices of this machine. Raises `LaunchError` where torch cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise LaunchError(f"running a plan needs torch, and importing it failed: {error}") from error
    return torch.cuda.device_count()


def check(plan: LaunchPlan, environment: Mapping[str, str], core_count: int, gpu_count: int) -> str | None:
    """A note for the user, or None. Raises `LaunchError` if the plan cannot run on this machine."""
    launches = launches_of(plan, environment)
    workers, fits = workers_here(plan, environment, gpu_count), gpu_count if gpu_count else max(1, core_count)
    instead = f"for this machine: pipeplan solve --cluster local --workers {fits}"
    if plan.device == "cuda" and gpu_count < workers:
        raise LaunchError(
            f"the plan needs {_count(workers, 'CUDA device')}{_where(plan, environment)}, and this machine has "
            f"{gpu_count or 'none'}; {instead}"
        )
    if launches > 1:
        missing = [name for name in NEEDED if not environment.get(name)]
        if missing:
            several = f"NNODES is {launches}: run launch.sh {launches} times"
            if launches == plan.servers:
                several = f"the plan spans {plan.servers} servers of {_workers_each(plan)}: run launch.sh on each"
            raise LaunchError(
                f"{several} with NODE_RANK=0 to {launches - 1}, and MASTER_ADDR and MASTER_PORT of server 0 (not set: "
                f"{', '.join(missing)}); {instead}"
            )
        _check_node(environment["NODE_RANK"], launches)
    elif workers != plan.world:
        raise LaunchError(
            f"the plan has {_count(plan.world, 'worker')}, and this launch alone would start {workers}: set WORKERS to "
            "the number that this launch starts, and NNODES to the number of launches"
        )
    if plan.device == "cpu" and workers > core_count:
        return f"note: {workers} workers share {_count(core_count, 'core')}, so the pace will be below the prediction"
    return None


def launches_of(plan: LaunchPlan, environment: Mapping[str, str]) -> int:
    """Number of times that launch.sh is run for one run of the plan: NNODES, or once on each server."""
    return _number(environment, "NNODES") or plan.servers


def workers_here(plan: LaunchPlan, environment: Mapping[str, str], gpu_count: int) -> int:
    """Number of workers to start on this machine: those of the largest server where nothing tells which one it is.

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
    known = node.isdecimal() and int(node) < plan.servers
    return plan.workers_on(int(node)) if known else plan.workers_per_server


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not text.isdecimal() or not int(text):
        raise LaunchError(f"{name} is {text!r}: it must be a whole number of at least 1")
    return int(text)


def _where(plan: LaunchPlan, environment: Mapping[str, str]) -> str:
    if environment.get("WORKERS"):
        return " on this machine (by WORKERS)"
    if plan.server_sizes:
        node = environment.get("NODE_RANK")
        return f" on server {node}" if node else " on its largest server"
    return f" on each of its {plan.servers} servers" if plan.servers > 1 else ""


def _workers_each(plan: LaunchPlan) -> str:
    sizes = plan.server_sizes
    return f"{listed(sizes)} workers" if sizes else _count(plan.workers_per_server, "worker")


def _check_node(text: str, launches: int) -> None:
    if not text.isdecimal() or int(text) >= launches:
        raise LaunchError(f"NODE_RANK is {text!r}: it must be this server's number, 0 to {launches - 1}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, which is 2 if the plan cannot run on this machine."""
    # Parses the workers' options too, so that --help and mistakes in them are printed once and before workers start.
    options = parser(prog="launch.sh").parse_args(arguments)
    try:
        plan = load_plan(options.plan_folder)
        beginning.check_torch()
        gpu_count = gpus() if plan.device == "cuda" else 0
        note = check(plan, os.environ, cores(), gpu_count)
        beginning.check(options, plan, os.environ, launches_of(plan, os.environ))
        print(workers_here(plan, os.environ, gpu_count))
    except LaunchError as error:
        print("error: " + " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    if note:
        print(note, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
