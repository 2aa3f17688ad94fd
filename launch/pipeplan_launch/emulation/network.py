"""Networks on one machine: namespaces joined by virtual cables that are shaped both ways, and processes in them.

Torch-free.

Jumbo frames, a burst of one of the kernel's largest segments and TCP reno make a shaped cable behave like a real one
(bbr measures the shaper instead of obeying it). Needs to be root of a network, mount and process namespace of its own:
`INSIDE` is the command that gives one, on most machines also without root. All that is made goes with the process.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

INSIDE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child")
"""A command that runs another one as root of network, mount and process namespaces of its own, which end with it."""
CLONE_NEWNET = 0x40000000  # from linux/sched.h
NAMES = Path("/run/netns")
CABLE = "cable"
"""The interface of every server."""


@dataclass(frozen=True)
class Node:
    """A server with so many workers, or a switch that joins what is below it."""

    rate: str = ""
    """Of its cable to the switch above, each way, as tc writes it: 100mbit. Empty: as fast as the machine is."""
    workers: int = 0
    below: tuple[Node, ...] = field(default_factory=tuple)
    name: str = ""
    """What people call it."""


@dataclass(frozen=True)
class Port:
    """Where a cable enters a switch."""

    switch: str
    """Namespace of the switch."""
    interface: str
    node: Node
    """What is at the other end."""


class Network:
    """The namespaces of a tree, whose root is a switch."""

    def __init__(self, root: Node) -> None:
        """Raises `RuntimeError` where the machine does not allow it."""
        self.servers: list[tuple[str, int]] = []
        """(namespace, workers), in order."""
        self.ports: list[Port] = []
        self._count = 0
        _run("mount -t tmpfs none /run")
        NAMES.mkdir()
        self._make(root)

    def _make(self, node: Node) -> str:
        name = f"ns{self._count}"
        self._count += 1
        _run(f"ip netns add {name}")
        _run(f"ip -n {name} link set lo up")
        if node.workers:
            self.servers.append((name, node.workers))
            _run(f"ip netns exec {name} sysctl -qw net.ipv4.tcp_congestion_control=reno")
            return name
        _run(f"ip -n {name} link add bridge type bridge")
        _run(f"ip -n {name} link set bridge mtu 9000 up")
        for number, one in enumerate(node.below):
            self._join(name, f"port{number}", one, self._make(one))
        return name

    def _join(self, above: str, port: str, node: Node, below: str) -> None:
        end = CABLE if node.workers else "uplink"
        _run(f"ip link add {end} netns {below} type veth peer name {port} netns {above}")
        for name, link in ((below, end), (above, port)):
            _run(f"ip -n {name} link set {link} mtu 9000 up")
            if node.rate:
                _run(f"ip netns exec {name} tc qdisc add dev {link} root tbf rate {node.rate} burst 64k latency 200ms")
        _run(f"ip -n {above} link set {port} master bridge")
        self.ports.append(Port(above, port, node))
        if node.workers:
            number = len(self.servers)
            _run(f"ip -n {below} addr add 10.0.{number >> 8}.{number & 255}/16 dev {end}")
        else:
            _run(f"ip -n {below} link set {end} master bridge")

    def start(self, work: Callable[[], object], port: int) -> list[tuple[int, int]]:
        """Do some work in a process for every worker, which finds RANK and the like set; (process id, rank) of each.

        What they need should be imported before: they are forked from here.
        """
        world = sum(workers for _, workers in self.servers)
        found = []
        for rank, (name, local, here) in enumerate(self._ranks()):
            variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here}
            variables["MASTER_PORT"] = port
            found.append((within(name, work, variables), rank))
        return found

    def _ranks(self) -> Iterator[tuple[str, int, int]]:
        for name, workers in self.servers:
            yield from ((name, local, workers) for local in range(workers))


def within(name: str, work: Callable[[], object], variables: Mapping[str, object] | None = None) -> int:
    """Do some work in a process of its own in a namespace; its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _be(name, variables or {}, work)
    return pid


def _be(name: str, variables: Mapping[str, object], work: Callable[[], object]) -> None:
    """One process, to its end."""
    status = 1
    try:
        enter(name)
        os.environ |= {key: str(value) for key, value in variables.items()}
        os.environ |= {"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": CABLE}
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def enter(name: str) -> None:
    """Have this thread see the network of a namespace."""
    with (NAMES / name).open() as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
