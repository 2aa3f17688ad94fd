"""The torchrun commands that start an exported script.

The servers that a grid of workers runs on, and its devices on each of them.
"""

from __future__ import annotations

import itertools

from pipeplan.cluster_data.cluster import Cluster


def workers_per_used_server(cluster: Cluster, count: int) -> list[int]:
    """The number of the first `count` workers on each server, without the servers that have none."""
    ends = itertools.accumulate(cluster.server_sizes)
    return [
        min(end, count) - (end - size)
        for end, size in zip(ends, cluster.server_sizes, strict=True)
        if end - size < count
    ]


def torchrun_commands(cluster: Cluster, workers: int, script: str, *, before: str = "") -> list[str]:
    """The commands that start a script on workers 0, 1, … of a cluster, one for each size of server.

    `script` is quoted for the shell already. `before` precedes the command, such as `NAME=value`.
    """
    sizes = workers_per_used_server(cluster, workers)
    start = f"{before} torchrun".strip()
    if len(sizes) == 1:
        return [f"{start} --standalone --nproc-per-node {sizes[0]} {script}"]
    rest = "--node-rank RANK --master-addr HOST --master-port 29500"
    lines = []
    for size in dict.fromkeys(sizes):
        numbers = [str(index) for index, one in enumerate(sizes) if one == size]
        who = "every server" if len(numbers) == len(sizes) else f"server {', '.join(numbers)}"
        run = f"{start} --nnodes {len(sizes)} --nproc-per-node {size} {rest} {script}"
        lines.append(f"on {who} (RANK is its number from 0, HOST the first): {run}")
    return lines
