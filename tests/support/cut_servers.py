"""A launch of two servers, each in a network namespace, whose link is cut once the run has a checkpoint.

    python cut_servers.py SCRIPT RUN SECONDS OPTION …     to be started with the prefix `OWN_NAMESPACES`

SECONDS is how long the link is cut, 0 for ever. After a cut that ends, the run has to go on; then server 0 is asked to
stop. Printed as JSON are the statuses of both launches.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from attacker import PATIENCE_S, wait_for_checkpoint
from attacker_of_servers import SECRET, launch, status_of
from network_namespaces import Network, NetworkNode, start_in_namespace


def main() -> None:
    """Launch both, cut, and print."""
    script, run, seconds, *options = sys.argv[1:]
    network = Network(NetworkNode(below=(NetworkNode(workers=1), NetworkNode(workers=1))))
    pids = [
        start_in_namespace(name, lambda node=node: launch(script, run, options, node, SECRET, f"{run}.{node}.log"))  # type: ignore[misc]
        for node, (name, _) in enumerate(network.servers)
    ]
    wait_for_checkpoint(Path(run), f"{run}.0.log")
    switch, interface = network.ports[1]
    port = ["ip", "-n", switch, "link", "set", interface]
    subprocess.run([*port, "down"], check=True)
    if float(seconds):
        time.sleep(float(seconds))
        subprocess.run([*port, "up"], check=True)
        metrics = Path(f"{run}/metrics/rank-1.jsonl")
        done, deadline = metrics.stat().st_size, time.monotonic() + PATIENCE_S
        while metrics.stat().st_size <= done and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(pids[0], signal.SIGTERM)
    print(json.dumps([status_of(pid) for pid in pids]))


if __name__ == "__main__":
    main()
