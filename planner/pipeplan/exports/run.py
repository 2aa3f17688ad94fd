"""How an exported script is started."""

from __future__ import annotations

import shlex

from pipeplan.cluster_data import Cluster
from pipeplan.exports.servers import used


def torchrun(cluster: Cluster, workers: int, script: str) -> list[str]:
    """The commands that start a script on workers 0, 1, … of a cluster, one for each kind of server."""
    sizes = used(cluster, workers)
    if len(sizes) == 1:
        return [f"torchrun --standalone --nproc-per-node {sizes[0]} {shlex.quote(script)}"]
    rest = "--node-rank RANK --master-addr HOST --master-port 29500"
    lines = []
    for size in dict.fromkeys(sizes):
        numbers = [str(index) for index, one in enumerate(sizes) if one == size]
        who = "every server" if len(numbers) == len(sizes) else f"server {', '.join(numbers)}"
        start = f"torchrun --nnodes {len(sizes)} --nproc-per-node {size} {rest} {shlex.quote(script)}"
        lines.append(f"on {who} (RANK is its number from 0, HOST the first): {start}")
    return lines
