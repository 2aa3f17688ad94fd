"""Counts the bytes that cross the cables of an emulated network, over time. Torch-free.

A process in each switch's namespace periodically records the kernel's counters of the switch's ports, and the busy time
of the machine's cores.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from pipeplan_launch.emulation.network_namespaces import SwitchPort, start_in_namespace

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
