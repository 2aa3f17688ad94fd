"""How much crosses the cables of an emulated network, over time. Torch-free.

A process in each switch's namespace reads the kernel's counters of its ports now and then, and writes them down, and
how much of its time the machine's cores were at work.
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

    def cores(self) -> dict[str, list[float]]:
        """Columns of times (seconds since the epoch), and of what all cores had worked, and could have, by then: ticks.

        To be asked when it has stopped.
        """
        rows = [json.loads(line) for line in self._path(self._switches()[0]).read_text().splitlines()]
        return {
            "time_s": [row[0] for row in rows],
            "busy": [row[2][0] for row in rows],
            "all": [row[2][1] for row in rows],
        }

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
            row = [time.time(), [counters[port.interface] for port in ports], _worked()]
            file.write(json.dumps(row) + "\n")
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


def _worked() -> tuple[int, int]:
    """Ticks that the cores were at work, and all ticks, since the machine started: the first line of /proc/stat."""
    with open("/proc/stat") as file:
        user, nice, system, idle, waiting, *others = map(int, file.readline().split()[1:9])
    busy = user + nice + system + sum(others)
    return busy, busy + idle + waiting
