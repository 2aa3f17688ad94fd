"""`python -m pipeplan_launch.preflight PLAN_FOLDER …`: can this machine run its part of the plan? Asked by launch.sh.

Checks the stage files, then compares the devices here with what one server of the plan needs. Torch is imported only
for a plan on GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeplan_launch.arguments import parser
from pipeplan_launch.config import LaunchPlan, load_plan
from pipeplan_launch.errors import LaunchError

NEEDED = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """CUDA devices here; none where torch is missing."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def check(plan: LaunchPlan, environment: Mapping[str, str], core_count: int, gpu_count: int) -> str | None:
    """Raises `LaunchError` if the plan cannot run here; else what the user should know, if anything."""
    per_server, fits = _workers_here(plan, environment), gpu_count if gpu_count else max(1, core_count)
    instead = f"for this machine: pipeplan solve --cluster local --workers {fits}"
    spread = f" on each of its {plan.servers} servers" if plan.servers > 1 else ""
    if plan.server_sizes:
        spread = f" on server {environment['NODE_RANK']}" if environment.get("NODE_RANK") else " on its largest server"
    if plan.device == "cuda" and gpu_count < per_server:
        raise LaunchError(
            f"the plan needs {_count(per_server, 'CUDA device')}{spread}, and this machine has {gpu_count or 'none'}; "
            f"{instead}"
        )
    if plan.servers > 1:
        missing = [name for name in NEEDED if not environment.get(name)]
        if missing:
            raise LaunchError(
                f"the plan spans {plan.servers} servers of {_workers_each(plan)}: run launch.sh on each with "
                f"NODE_RANK=0 to {plan.servers - 1}, and MASTER_ADDR and MASTER_PORT of server 0 (not set: "
                f"{', '.join(missing)}); {instead}"
            )
        _check_node(environment["NODE_RANK"], plan.servers)
    if plan.device == "cpu" and per_server > core_count:
        return (
            f"note: {per_server} workers share {_count(core_count, 'core')}, so the pace will be below the prediction"
        )
    return None


def _workers_here(plan: LaunchPlan, environment: Mapping[str, str]) -> int:
    """Workers on this server; on the largest where it is not known which this is."""
    node = environment.get("NODE_RANK", "")
    known = node.isdecimal() and int(node) < plan.servers
    return plan.workers_on(int(node)) if known else plan.workers_per_server


def _workers_each(plan: LaunchPlan) -> str:
    sizes = [str(size) for size in plan.server_sizes]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]} workers" if sizes else _count(plan.workers_per_server, "worker")


def _check_node(text: str, servers: int) -> None:
    if not text.isdecimal() or int(text) >= servers:
        raise LaunchError(f"NODE_RANK is {text!r}: it must be this server's number, 0 to {servers - 1}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status, 2 if the plan cannot run here."""
    # The workers' options too, so that --help and what is wrong with them come out once and at once.
    folder: Path = parser(prog="launch.sh").parse_args(arguments).plan_folder
    try:
        plan = load_plan(folder)
        note = check(plan, os.environ, cores(), gpus() if plan.device == "cuda" else 0)
    except LaunchError as error:
        print("error: " + " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    if note:
        print(note, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
