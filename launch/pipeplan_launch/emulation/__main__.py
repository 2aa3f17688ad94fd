"""`python -m pipeplan_launch.emulation ORDER`: run a plan folder's workers on emulated servers.

The command prefix `network_namespaces.OWN_NAMESPACES` starts it. ORDER is a JSON file:

    plan        the plan folder
    network     the tree of switches and servers, as `network_namespaces.NetworkNode`
    arguments   arguments of every worker after the plan folder
    out         the file for the results
    limit_s     time limit of the run, in seconds
    fault       the fault to inject, as `fault_injection.InjectedFault`, or null. With a fault, launchers run the
                workers, which are otherwise forked from this process after one import of torch

Standard input is a pipe that the starting process holds open as long as it wants the results.
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

from pipeplan_launch.emulation import fault_injection
from pipeplan_launch.emulation.link_counters import LinkCounters
from pipeplan_launch.emulation.network_namespaces import Network, NetworkNode
from pipeplan_launch.emulation.parent_watch import end_with_parent

PORT = 29400
FAILED = 2


def main(order: Path) -> int:
    """Carry out the order in a file; returns the exit status."""
    content = json.loads(order.read_text())
    end_with_parent()
    try:
        if content.get("fault"):
            _mount_proc()
        network = Network(node_from_json(content["network"]))
    except (RuntimeError, OSError) as error:
        print(f"the network cannot be made: {error}", file=sys.stderr)
        return FAILED
    results = fault_injection.run_with_fault(network, content, PORT) if content.get("fault") else _run(network, content)
    Path(content["out"]).write_text(json.dumps(results))
    return 0


def _mount_proc() -> None:
    """Mount a /proc with the processes of this process namespace."""
    done = subprocess.run(["mount", "-t", "proc", "proc", "/proc"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())


def _run(network: Network, order: Mapping[str, Any]) -> dict[str, Any]:
    _import_for_workers()
    counting = LinkCounters(network.ports, Path(order["out"]).parent)
    began = time.monotonic()
    statuses, late = _finish(dict(network.start(lambda: _work(order), PORT)), began + order["limit_s"])
    return {
        "statuses": [statuses[rank] for rank in sorted(statuses)],
        "late": late,
        "seconds": time.monotonic() - began,
        "traffic": counting.stop(),
        "cores": counting.cores(),
    }


def node_from_json(content: Mapping[str, Any]) -> NetworkNode:
    """A node from its JSON object."""
    below = tuple(node_from_json(one) for one in content.get("below", ()))
    return NetworkNode(content.get("rate", ""), content.get("workers", 0), below, content.get("name", ""))


def _import_for_workers() -> None:
    """Import the modules that workers need once, before the workers are forked from this process."""
    for name in ("torch._dynamo", "pipeplan_launch.worker", "pipeplan_launch.checkpoint.tensor_store"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _work(order: Mapping[str, Any]) -> None:
    """Run one worker."""
    from pipeplan_launch import __main__ as executor

    raise SystemExit(executor.main([order["plan"], *order["arguments"]]))


def _finish(workers: dict[int, int], deadline: float) -> tuple[dict[int, int], bool]:
    """(exit statuses by rank, whether the workers were ended only because the time was up).

    `workers`: ranks by process id. Once a worker fails, the others have five seconds to end.
    """
    statuses: dict[int, int] = {}
    late = False
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in workers:
            statuses[workers.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status:
                deadline = min(deadline, time.monotonic() + 5)
        elif not pid:
            if time.monotonic() > deadline:
                late = late or not any(statuses.values())
                for one in workers:
                    os.kill(one, signal.SIGKILL)
            time.sleep(0.05)
    return statuses, late


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
