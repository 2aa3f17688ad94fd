"""The torchrun commands that start an exported script."""

from __future__ import annotations

from pipeplan.cluster_data import Cluster
from pipeplan.exports.servers import used


def torchrun(cluster: Cluster, workers: int, script: str, *, before: str = "") -> list[str]:
    """The commands that start a script on workers 0, 1, … of a cluster, one for each size of server.

    `script` is quoted for the shell already. `before` precedes the command, such as `NAME=value`.
    """
    sizes = used(cluster, workers)
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
