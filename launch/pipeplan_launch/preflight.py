"""`python -m pipeplan_launch.preflight PLAN_FOLDER …`: can this machine run its part of the plan? Asked by launch.sh.

Checks the stage files, then compares the devices here with what one server of the plan needs, and prints how many
workers to start. Torch is imported only for a plan on GPUs.

Which server of the plan this is need not be known: workers find their places when all are there
(`pipeplan_launch.placement`). How many start here is WORKERS; else what all servers have; else, where servers differ,
the GPUs that are here if that is the size of a server; else the size of server NODE_RANK.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from pipeplan_launch import beginning
from pipeplan_launch.arguments import parser
from pipeplan_launch.config import LaunchPlan, load_plan
from pipeplan_launch.errors import LaunchError

NEEDED = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """CUDA devices here. Raises `LaunchError` where torch is broken."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise LaunchError(f"running a plan needs torch, and importing it failed: {error}") from error
    return torch.cuda.device_count()


def check(plan: LaunchPlan, environment: Mapping[str, str], core_count: int, gpu_count: int) -> str | None:
    """Raises `LaunchError` if the plan cannot run here; else what the user should know, if anything."""
    launches = launches_of(plan, environment)
    here, fits = workers_here(plan, environment, gpu_count), gpu_count if gpu_count else max(1, core_count)
    instead = f"for this machine: pipeplan solve --cluster local --workers {fits}"
    if plan.device == "cuda" and gpu_count < here:
        raise LaunchError(
            f"the plan needs {_count(here, 'CUDA device')}{_where(plan, environment)}, and this machine has "
            f"{gpu_count or 'none'}; {instead}"
        )
    if launches > 1:
        missing = [name for name in NEEDED if not environment.get(name)]
        if missing:
            several = f"NNODES is {launches}: run launch.sh so often"
            if launches == plan.servers:
                several = f"the plan spans {plan.servers} servers of {_workers_each(plan)}: run launch.sh on each"
            raise LaunchError(
                f"{several} with NODE_RANK=0 to {launches - 1}, and MASTER_ADDR and MASTER_PORT of server 0 (not set: "
                f"{', '.join(missing)}); {instead}"
            )
        _check_node(environment["NODE_RANK"], launches)
    elif here != plan.world:
        raise LaunchError(
            f"the plan has {_count(plan.world, 'worker')}, and {here} would start here alone: WORKERS is how many start"
            " here, and NNODES how often launch.sh is run in all"
        )
    if plan.device == "cpu" and here > core_count:
        return f"note: {here} workers share {_count(core_count, 'core')}, so the pace will be below the prediction"
    return None


def launches_of(plan: LaunchPlan, environment: Mapping[str, str]) -> int:
    """How often launch.sh is run, all together: on each server once, unless NNODES says otherwise."""
    return _number(environment, "NNODES") or plan.servers


def workers_here(plan: LaunchPlan, environment: Mapping[str, str], gpu_count: int) -> int:
    """Workers to start here; those of the largest server where it is not known which this is."""
    given = _number(environment, "WORKERS")
    if given is not None:
        if given > plan.world:
            raise LaunchError(f"WORKERS is {given}: the whole plan has {_count(plan.world, 'worker')}")
        return given
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
        return " here (WORKERS says so)"
    if plan.server_sizes:
        node = environment.get("NODE_RANK")
        return f" on server {node}" if node else " on its largest server"
    return f" on each of its {plan.servers} servers" if plan.servers > 1 else ""


def _workers_each(plan: LaunchPlan) -> str:
    sizes = [str(size) for size in plan.server_sizes]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]} workers" if sizes else _count(plan.workers_per_server, "worker")


def _check_node(text: str, launches: int) -> None:
    if not text.isdecimal() or int(text) >= launches:
        raise LaunchError(f"NODE_RANK is {text!r}: it must be this server's number, 0 to {launches - 1}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status, 2 if the plan cannot run here."""
    # The workers' options too, so that --help and what is wrong with them come out once and at once.
    given = parser(prog="launch.sh").parse_args(arguments)
    try:
        plan = load_plan(given.plan_folder)
        beginning.check_torch()
        gpu_count = gpus() if plan.device == "cuda" else 0
        note = check(plan, os.environ, cores(), gpu_count)
        beginning.check(given, plan, os.environ, launches_of(plan, os.environ))
        print(workers_here(plan, os.environ, gpu_count))
    except LaunchError as error:
        print("error: " + " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    if note:
        print(note, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
