"""Runs a plan folder's workers on emulated servers: `python emulation.py ORDER`, started with `OWN_NAMESPACES`.

ORDER is a JSON file:

    plan        the plan folder
    network     the tree of switches and servers, as `network_namespaces.NetworkNode`
    arguments   arguments of every worker after the plan folder
    out         the file for the results
    limit_s     time limit of the run, in seconds

Workers are forked from this process after one import of torch.
Standard input is a pipe that the starting process holds open as long as it wants the results.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from network_namespaces import Network, NetworkNode

PORT = 29400
FAILED = 2


def main(order: Path) -> int:
    """Carry out the order in a file; returns the exit status."""
    content = json.loads(order.read_text())
    end_with_parent()
    try:
        network = Network(node_from_json(content["network"]))
    except (RuntimeError, OSError) as error:
        print(f"the network cannot be made: {error}", file=sys.stderr)
        return FAILED
    Path(content["out"]).write_text(json.dumps(_run(network, content)))
    return 0


def _run(network: Network, order: Mapping[str, Any]) -> dict[str, Any]:
    _import_for_workers()
    deadline = time.monotonic() + order["limit_s"]
    statuses, late = _finish(dict(network.start(lambda: _work(order), PORT)), deadline)
    return {"statuses": [statuses[rank] for rank in sorted(statuses)], "late": late}


def node_from_json(content: Mapping[str, Any]) -> NetworkNode:
    """A node from its JSON object."""
    below = tuple(node_from_json(one) for one in content.get("below", ()))
    return NetworkNode(content.get("rate", ""), content.get("workers", 0), below, content.get("name", ""))


def _import_for_workers() -> None:
    """Import the modules that workers need once, before the workers are forked from this process."""
    for name in ("torch._dynamo", "pipeplan_launch.worker"):
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


def end_with_parent() -> None:
    """End this process, and with it its process namespace, once standard input is closed. Nothing is written to it.

    Processes that are started afterwards have no standard input.
    """
    reader = os.dup(0)  # programs that are started later do not inherit this descriptor
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # The first process of a namespace ignores signals without a handler.
    signal.signal(signal.SIGIO, lambda *_: os._exit(1))
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([reader], [], [], 0)[0]:  # standard input was closed before
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
