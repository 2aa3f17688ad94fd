"""What benchmarks of links need of an emulated network, beyond what replays do."""

from __future__ import annotations

import os
from collections.abc import Callable

from network_namespaces import Network, NetworkNode


def several(count: int, node: NetworkNode) -> tuple[NetworkNode, ...]:
    """So many of the same."""
    return (node,) * count


def run(network: Network, work: Callable[[], object], port: int) -> list[int]:
    """Do some work in a process for every worker; their exit statuses, of which a signal's is negative."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in network.start(work, port)]
