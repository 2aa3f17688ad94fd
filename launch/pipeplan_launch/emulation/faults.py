"""A fault in the middle of an emulation that launchers run, and what they make of it. Torch-free.

kill     a worker's process ends by SIGKILL
freeze   a worker's process is stopped, for good
cut      a cable is pulled, for good
flap     a cable is pulled, and plugged in again
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeplan_launch.emulation.launches import Launches
from pipeplan_launch.emulation.network import Network

EVERY_S = 0.03


@dataclass(frozen=True)
class Fault:
    """What is to happen, and when."""

    kind: str
    worker: int | None = None
    """Whose process."""
    cable: str | None = None
    """The name of what it joins to the rest."""
    lasts_s: float | None = None
    after_minibatches: int | None = None
    after_s: float | None = None
    """Since the first minibatch."""


class _Striking:
    """Makes a fault happen once its moment has come."""

    def __init__(self, fault: Fault, network: Network) -> None:
        self._fault, self._network = fault, network
        self.struck_s: float | None = None
        self.healed_s: float | None = None
        self.done: int | None = None
        """Minibatches by then, as far as was said."""

    def look(self, launches: Launches) -> None:
        """To be called often."""
        now, lasts = time.time(), self._fault.lasts_s
        if self.struck_s is None:
            if self._due(launches, now) and self._strike(launches):
                self.struck_s, self.done = time.time(), launches.done
        elif lasts is not None and self.healed_s is None and now >= self.struck_s + lasts:
            self._set_cable("up")
            self.healed_s = time.time()

    def _due(self, launches: Launches, now: float) -> bool:
        if launches.trains_s is None:
            return False
        if self._fault.after_minibatches is not None:
            return launches.done >= self._fault.after_minibatches
        return now >= launches.trains_s + (self._fault.after_s or 0.0)

    def _strike(self, launches: Launches) -> bool:
        if self._fault.worker is None:
            self._set_cable("down")
            return True
        pid = launches.pid_of(self._fault.worker)
        if pid is None:  # it is just being started
            return False
        os.kill(pid, signal.SIGKILL if self._fault.kind == "kill" else signal.SIGSTOP)
        return True

    def _set_cable(self, state: str) -> None:
        port = next(port for port in self._network.ports if port.node.name == self._fault.cable)
        command = ["ip", "-n", port.switch, "link", "set", port.interface, state]
        subprocess.run(command, check=True)


def run(network: Network, given: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Carry an order with a `fault` out; what happened, as the order's file is to have it."""
    striking = _Striking(Fault(**given["fault"]), network)
    launches = Launches()
    began = time.time()
    launches.start(network, [given["plan"], *given["arguments"]], port, Path(given["out"]).parent)
    while launches.running and time.time() < began + given["limit_s"]:
        launches.look()
        striking.look(launches)
        time.sleep(EVERY_S)
    launches.look()
    return {
        "began_s": began,
        "trains_s": launches.trains_s,
        "struck_s": striking.struck_s,
        "struck_after": striking.done,
        "healed_s": striking.healed_s,
        "ended_s": launches.ended_s,
        "statuses": launches.statuses,
        "workers": [asdict(life) for life in launches.lives],
        "lines": [asdict(line) for line in launches.lines],
    }
