"""Runs a plan folder's workers on emulated servers: `python emulation.py ORDER`, started with `OWN_NAMESPACES`.

ORDER is a JSON file:

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

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fault_injection
from network_namespaces import Network, NetworkNode, SwitchPort, start_in_namespace

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


EVERY_S = 0.1


class LinkCounters:
    """Records counters of all ports until `stop`."""

    def __init__(self, ports: Sequence[SwitchPort], folder: Path) -> None:
        self._ports, self._folder = ports, folder
        self._pids = [
            start_in_namespace(switch, lambda switch=switch: _count(self._of(switch), self._path(switch)))  # type: ignore[misc]
            for switch in self._switches()
        ]

    def stop(self) -> list[dict[str, object]]:
        """Stop recording; returns for every cable its name, and columns of times (seconds since 1970) and bytes so far.

        `out` counts bytes that left the node below, `into` bytes that went to it.
        """
        for pid in self._pids:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
        cables: list[dict[str, object]] = []
        for switch in self._switches():
            rows = [json.loads(line) for line in self._path(switch).read_text().splitlines()]
            for number, port in enumerate(self._of(switch)):
                out, into = ([row[1][number][way] for row in rows] for way in (0, 1))
                cables.append({"name": port.node.name, "time_s": [row[0] for row in rows], "out": out, "into": into})
        return cables

    def cores(self) -> dict[str, list[float]]:
        """Columns of times (seconds since 1970), and of busy ticks and all ticks of all cores so far.

        To be called after `stop`.
        """
        rows = [json.loads(line) for line in self._path(self._switches()[0]).read_text().splitlines()]
        return {
            "time_s": [row[0] for row in rows],
            "busy": [row[2][0] for row in rows],
            "all": [row[2][1] for row in rows],
        }

    def _switches(self) -> list[str]:
        return list(dict.fromkeys(port.switch for port in self._ports))

    def _of(self, switch: str) -> list[SwitchPort]:
        return [port for port in self._ports if port.switch == switch]

    def _path(self, switch: str) -> Path:
        return self._folder / f"traffic-{switch}.jsonl"


def _count(ports: Sequence[SwitchPort], path: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with path.open("w") as file:
        while True:
            counters = _counters()
            row = [time.time(), [counters[port.interface] for port in ports], _core_ticks()]
            file.write(json.dumps(row) + "\n")
            file.flush()
            time.sleep(EVERY_S)


def _counters() -> dict[str, tuple[int, int]]:
    """(received, sent) bytes by interface, from /proc/net/dev. Bytes that a port receives have left the node below."""
    counters = {}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        columns = numbers.split()
        counters[name.strip()] = (int(columns[0]), int(columns[8]))
    return counters


def _core_ticks() -> tuple[int, int]:
    """(busy ticks, all ticks) of all cores since the machine started, from the first line of /proc/stat."""
    with open("/proc/stat") as file:
        user, nice, system, idle, waiting, *others = map(int, file.readline().split()[1:9])
    busy = user + nice + system + sum(others)
    return busy, busy + idle + waiting


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
