"""How much crosses the cables of an emulated network, over time. Torch-free.

A process in each switch's namespace reads the kernel's counters of its ports now and then, and writes them down.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from pipeplan_launch.emulation.network import Port, within

EVERY_S = 0.1


class Counting:
    """Counts until it is told to stop."""

    def __init__(self, ports: Sequence[Port], folder: Path) -> None:
        self._ports, self._folder = ports, folder
        self._pids = [
            within(switch, lambda switch=switch: _count(self._of(switch), self._path(switch)))  # type: ignore[misc]
            for switch in self._switches()
        ]

    def stop(self) -> list[dict[str, object]]:
        """For every cable: its name, and columns of times (seconds since the epoch) and bytes so far.

        `out` is what left the node below, `into` what went to it.
        """
        for pid in self._pids:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
        found: list[dict[str, object]] = []
        for switch in self._switches():
            rows = [json.loads(line) for line in self._path(switch).read_text().splitlines()]
            for number, port in enumerate(self._of(switch)):
                out, into = ([row[1][number][way] for row in rows] for way in (0, 1))
                found.append({"name": port.node.name, "time_s": [row[0] for row in rows], "out": out, "into": into})
        return found

    def _switches(self) -> list[str]:
        return list(dict.fromkeys(port.switch for port in self._ports))

    def _of(self, switch: str) -> list[Port]:
        return [port for port in self._ports if port.switch == switch]

    def _path(self, switch: str) -> Path:
        return self._folder / f"traffic-{switch}.jsonl"


def _count(ports: Sequence[Port], path: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with path.open("w") as file:
        while True:
            counters = _counters()
            file.write(json.dumps([time.time(), [counters[port.interface] for port in ports]]) + "\n")
            file.flush()
            time.sleep(EVERY_S)


def _counters() -> dict[str, tuple[int, int]]:
    """(received, sent) bytes by interface, as /proc/net/dev has them; what a port receives has left the node below."""
    found = {}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        columns = numbers.split()
        found[name.strip()] = (int(columns[0]), int(columns[8]))
    return found
