"""The nodes of a SLURM job: where its workers meet, and the srun command that starts them."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeplan_launch.errors import LaunchError

FIRST_PORT = 20000
"""The port of a job is this and the last four digits of its number, or the next free one."""


@dataclass(frozen=True)
class Component:
    """Nodes of a job that are alike. A job whose nodes differ has several (a heterogeneous job)."""

    nodes: int
    cores: int
    """Cores of the task on one node."""

    @classmethod
    def parse(cls, text: str) -> Component:
        """Parse `NODES:CORES`. Raises `ValueError`."""
        nodes, cores = map(int, text.split(":"))
        return cls(nodes, cores)


def rendezvous_variables(job: str, components: Sequence[Component], environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR, MASTER_PORT and NNODES for launch.sh. To be called on the first node. Raises `LaunchError`."""
    count = sum(component.nodes for component in components)
    nodes = environment.get("SLURM_JOB_NODELIST_HET_GROUP_0") or environment.get("SLURM_JOB_NODELIST", "")
    first = first_line("scontrol", "show", "hostnames", nodes)
    if not first:
        raise LaunchError("SLURM does not say which nodes the job has")
    has = environment.get("SLURM_JOB_NUM_NODES") or str(count)
    if len(components) == 1 and has != str(count):
        raise LaunchError(f"the plan is for {count} nodes, and the job has {has}")
    return {"MASTER_ADDR": _address(first), "MASTER_PORT": str(_free_port(job)), "NNODES": str(count)}


def srun_command(components: Sequence[Component], task: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command that runs `task` once on every node, as one step of the job."""
    if len(components) > 1:
        command = ["srun"]
        for group, component in enumerate(components):
            command += [*([":"] if group else []), f"--het-group={group}", "--export=ALL", "--ntasks-per-node=1"]
            command += [f"--cpus-per-task={component.cores}", "--kill-on-bad-exit=1", "--label", *task]
        return command
    (component,) = components
    nodes = [f"--nodes={component.nodes}", f"--ntasks={component.nodes}", "--ntasks-per-node=1"]
    label = ["--label"] if component.nodes > 1 else []
    cores = environment.get("SLURM_CPUS_PER_TASK") or str(component.cores)
    return ["srun", "--export=ALL", *nodes, "--kill-on-bad-exit=1", *label, f"--cpus-per-task={cores}", *task]


def first_line(*command: str) -> str:
    """The first line that a command prints; empty where it prints none, or cannot be run."""
    return next(output_lines(*command), "")


def output_lines(*command: str) -> Iterator[str]:
    """The lines that a command prints; none where it cannot be run."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="surrogateescape", check=False)
    except OSError:
        return
    yield from done.stdout.splitlines()


def _address(node: str) -> str:
    """A name or address by which other nodes reach `node`: some clusters have names that only SLURM knows."""
    known = subprocess.run(["getent", "hosts", node], stdout=subprocess.DEVNULL, check=False).returncode == 0
    if known:
        return node
    for line in output_lines("scontrol", "show", "node", node):
        if found := re.search(r"NodeAddr=(\S+)", line):
            return found[1]
    raise LaunchError(f"{node} has no address that the other nodes can reach: `scontrol show node` gives no NodeAddr")


def _free_port(job: str) -> int:
    """A free port of this machine; a restarted job gets the same one unless it is taken by then."""
    port = FIRST_PORT + int(job) % 10000
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
        port += 1
