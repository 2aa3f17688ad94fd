"""`python -m pipeplan_launch.emulation ORDER`: run a plan folder's workers on emulated servers.

To be started by `network.INSIDE`. ORDER is a JSON file:

    plan        the plan folder
    network     the tree of switches and servers, as `network.Node`
    arguments   of every worker, after the plan folder
    out         the file for what happened
    limit_s     when to give up
    fault       none, or one to happen, as `faults.Fault`: then launchers run the workers, which else are forked from
                here after one import of torch

Standard input is a pipe that whoever starts this holds open for as long as the answer is wanted.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeplan_launch.emulation import faults
from pipeplan_launch.emulation.leash import end_with_asker
from pipeplan_launch.emulation.network import Network, Node
from pipeplan_launch.emulation.traffic import Counting

PORT = 29400
SHARED_MEMORY = "PIPEPLAN_SHARED_MEMORY"  # as `pipeplan_launch.transport` has it, which imports torch
FAILED = 2


def main(order: Path) -> int:
    """Carry out an order; the exit status."""
    given = json.loads(order.read_text())
    end_with_asker()
    os.environ[SHARED_MEMORY] = "0"  # links are to carry what workers of one server send, too
    try:
        if given.get("fault"):
            _show_own_processes()
        network = Network(node_of(given["network"]))
    except (RuntimeError, OSError) as error:
        print(f"the network cannot be made: {error}", file=sys.stderr)
        return FAILED
    found = faults.run(network, given, PORT) if given.get("fault") else _run(network, given)
    Path(given["out"]).write_text(json.dumps(found))
    return 0


def _show_own_processes() -> None:
    done = subprocess.run(["mount", "-t", "proc", "proc", "/proc"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())


def _run(network: Network, given: Mapping[str, Any]) -> dict[str, Any]:
    _import_what_workers_need()
    counting = Counting(network.ports, Path(given["out"]).parent)
    began = time.time()
    statuses, late = _finish(dict(network.start(lambda: _work(given), PORT)), began + given["limit_s"])
    return {
        "statuses": [statuses[rank] for rank in sorted(statuses)],
        "late": late,
        "seconds": time.time() - began,
        "traffic": counting.stop(),
        "cores": counting.cores(),
    }


def node_of(given: Mapping[str, Any]) -> Node:
    """A node as JSON has it."""
    below = tuple(node_of(one) for one in given.get("below", ()))
    return Node(given.get("rate", ""), given.get("workers", 0), below, given.get("name", ""))


def _import_what_workers_need() -> None:
    """Once, and not in every worker: they are forked from here."""
    for name in ("torch._dynamo", "pipeplan_launch.worker", "pipeplan_launch.storage"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _work(given: Mapping[str, Any]) -> None:
    """Be one worker."""
    from pipeplan_launch import __main__ as executor

    raise SystemExit(executor.main([given["plan"], *given["arguments"]]))


def _finish(workers: dict[int, int], deadline: float) -> tuple[dict[int, int], bool]:
    """Exit statuses by rank, and whether all was well but for the time, which was up.

    `workers`: ranks by process id. Once one fails, the others get a moment.
    """
    statuses: dict[int, int] = {}
    late = False
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in workers:
            statuses[workers.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status:
                deadline = min(deadline, time.time() + 5)
        elif not pid:
            if time.time() > deadline:
                late = late or not any(statuses.values())
                for one in workers:
                    os.kill(one, signal.SIGKILL)
            time.sleep(0.05)
    return statuses, late


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
