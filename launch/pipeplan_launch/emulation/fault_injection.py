"""Injects a fault into an emulation that launchers run, and records how they handle it. Torch-free.

kill     a worker's process is killed (SIGKILL)
freeze   a worker's process is stopped for good (SIGSTOP)
cut      a cable is disconnected for good
flap     a cable is disconnected and connected again
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

from pipeplan_launch.emulation.launchers import ServerLaunchers
from pipeplan_launch.emulation.network_namespaces import Network

EVERY_S = 0.03


@dataclass(frozen=True)
class InjectedFault:
    """A fault and the time at which it occurs."""

    kind: str
    """`kill`, `freeze`, `cut` or `flap`."""
    worker: int | None = None
    """The worker whose process is killed or stopped."""
    cable: str | None = None
    """Name of the node whose cable to the switch above is disconnected."""
    lasts_s: float | None = None
    """Time after which the cable is connected again."""
    after_minibatches: int | None = None
    """Minibatches after which the fault occurs; None if `after_s` sets the time."""
    after_s: float | None = None
    """Seconds since the first minibatch after which the fault occurs."""


class _Injector:
    """Injects a fault once it is due."""

    def __init__(self, fault: InjectedFault, network: Network) -> None:
        self._fault, self._network = fault, network
        self.injected_s: float | None = None
        self.healed_s: float | None = None
        self.done: int | None = None
        """Minibatches before the fault, as far as the workers reported them."""

    def look(self, launches: ServerLaunchers) -> None:
        """Inject or heal the fault if that is due. To be called often."""
        now, lasts = time.time(), self._fault.lasts_s
        if self.injected_s is None:
            if self._is_due(launches, now) and self._inject(launches):
                self.injected_s, self.done = time.time(), launches.done
        elif lasts is not None and self.healed_s is None and now >= self.injected_s + lasts:
            self._set_cable("up")
            self.healed_s = time.time()

    def _is_due(self, launches: ServerLaunchers, now: float) -> bool:
        if launches.trains_s is None:
            return False
        if self._fault.after_minibatches is not None:
            return launches.done >= self._fault.after_minibatches
        return now >= launches.trains_s + (self._fault.after_s or 0.0)

    def _inject(self, launches: ServerLaunchers) -> bool:
        if self._fault.worker is None:
            self._set_cable("down")
            return True
        pid = launches.pid_of(self._fault.worker)
        if pid is None:  # the worker is just being started
            return False
        os.kill(pid, signal.SIGKILL if self._fault.kind == "kill" else signal.SIGSTOP)
        return True

    def _set_cable(self, state: str) -> None:
        port = next(port for port in self._network.ports if port.node.name == self._fault.cable)
        command = ["ip", "-n", port.switch, "link", "set", port.interface, state]
        subprocess.run(command, check=True)


def run_with_fault(network: Network, order: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Carry out an order that has a `fault`; returns the content of its results file."""
    injector = _Injector(InjectedFault(**order["fault"]), network)
    launches = ServerLaunchers()
    deadline = time.monotonic() + order["limit_s"]
    began = time.time()
    launches.start(network, [order["plan"], *order["arguments"]], port, Path(order["out"]).parent)
    while launches.running and time.monotonic() < deadline:
        launches.look()
        injector.look(launches)
        time.sleep(EVERY_S)
    launches.look()
    return {
        "began_s": began,
        "trains_s": launches.trains_s,
        "struck_s": injector.injected_s,
        "struck_after": injector.done,
        "healed_s": injector.healed_s,
        "ended_s": launches.ended_s,
        "statuses": launches.statuses,
        "workers": [asdict(life) for life in launches.lives],
        "lines": [asdict(line) for line in launches.lines],
    }
