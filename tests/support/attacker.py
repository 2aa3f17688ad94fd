"""A launch in one network namespace, and an attacker in another; prints what the attacker reaches, as JSON.

    python attacker.py SCRIPT RUN OPTION …      to be started with the prefix `network_namespaces.OWN_NAMESPACES`

The namespaces are joined by cables. Once the run has a checkpoint, the attacker tries every TCP port of its machine,
and sends what torch's store would answer, and then garbage, to each that is open. A port that the test itself opens
there shows that the attacker reaches the machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from network_namespaces import Network, NetworkNode, start_in_namespace

VICTIM, CONTROL_PORT = "10.0.0.1", 5555
STORE_HELLO = b"\x0b\x3c\x85\x5c\x00"
"""torch's magic number of a TCPStore, as a client sends it first."""
PATIENCE_S = 120


def _victim(script: str, run: str, options: list[str]) -> None:
    socket_of_control = socket.create_server(("0.0.0.0", CONTROL_PORT))
    os.set_inheritable(socket_of_control.fileno(), True)
    for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        del os.environ[name]
    log = os.open(f"{run}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execv(script, [script, "--run-dir", run, *options])


def _attack(found: Path) -> None:
    opened = []
    for port in range(1, 1 << 16):
        with socket.socket() as probe:
            probe.settimeout(5)
            if probe.connect_ex((VICTIM, port)) == 0:
                opened.append(port)
                with suppress(OSError):
                    probe.sendall(STORE_HELLO + os.urandom(4096))
    found.write_text(json.dumps(opened))


def main() -> None:
    """Launch, attack, stop the launch, and print {open ports, status of the launch}."""
    script, run, *options = sys.argv[1:]
    folder = Path(run)
    network = Network(NetworkNode(below=(NetworkNode(workers=1), NetworkNode(workers=1))))
    (inside, _), (outside, _) = network.servers
    launch = start_in_namespace(inside, lambda: _victim(script, run, options))
    wait_for_checkpoint(folder, f"{run}.log")
    attack = start_in_namespace(outside, lambda: _attack(folder.parent / "opened.json"))
    _, attacked = os.waitpid(attack, 0)
    before = len(list(folder.glob("checkpoints/*/manifest.json")))
    os.kill(launch, signal.SIGTERM)
    _, status = os.waitpid(launch, 0)
    answer: dict[str, Any] = {
        "open": json.loads((folder.parent / "opened.json").read_text()),
        "attack": os.waitstatus_to_exitcode(attacked),
        "status": os.waitstatus_to_exitcode(status),
        "checkpoints": before,
    }
    print(json.dumps(answer))


def wait_for_checkpoint(run: Path, log: str) -> None:
    """Wait until a run has a checkpoint."""
    deadline = time.monotonic() + PATIENCE_S
    while not list(run.glob("checkpoints/*/manifest.json")):
        if time.monotonic() > deadline:
            raise SystemExit(f"the launch has no checkpoint: {Path(log).read_text()[-2000:]}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
