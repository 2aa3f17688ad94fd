"""Emulated networks on one machine: namespaces joined by virtual cables with limited rates, and processes in them.

Torch-free. Jumbo frames, a burst of the size of the kernel's largest segment and TCP Reno make a shaped cable behave
like a real one (BBR would measure the shaper instead of obeying it). The process must be root of its own network, mount
and process namespaces; the command `OWN_NAMESPACES` provides them, on most machines without root. The network ends
with the process.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan_launch.elastic.local_workers import fork_worker

OWN_NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child")
"""A command prefix that runs a command as root of its own network, mount and process namespaces, which end with it."""
CLONE_NEWNET = 0x40000000  # from linux/sched.h
NAMES = Path("/run/netns")
CABLE_INTERFACE = "cable"
"""Name of the network interface of every server."""


@dataclass(frozen=True)
class NetworkNode:
    """A server with workers, or a switch that joins the nodes below it."""

    rate: str = ""
    """Rate of the cable to the switch above, in each direction, in tc's notation (`100mbit`). Empty: not limited."""
    workers: int = 0
    """Number of workers on a server; 0 for a switch."""
    below: tuple[NetworkNode, ...] = field(default_factory=tuple)
    name: str = ""
    """Name for messages."""
    burst: str = "64k"
    """Bytes that an idle cable sends at once, in tc's notation."""


class Network:
    """The namespaces of a tree of nodes, whose root is a switch."""

    def __init__(self, root: NetworkNode) -> None:
        """Raises `RuntimeError` if the machine does not allow namespaces."""
        self.servers: list[tuple[str, int]] = []
        """(namespace, number of workers) of each server, in order."""
        self.ports: list[tuple[str, str]] = []
        """(namespace of the switch, its interface) of each cable, in the order of the nodes below."""
        self._count = 0
        _run("mount -t tmpfs none /run")
        NAMES.mkdir()
        _run("ip link set lo up")
        self._make(root)

    def _make(self, node: NetworkNode) -> str:
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

    def _join(self, above: str, port: str, node: NetworkNode, below: str) -> None:
        end = CABLE_INTERFACE if node.workers else "uplink"
        _run(f"ip link add {end} netns {below} type veth peer name {port} netns {above}")
        for name, link in ((below, end), (above, port)):
            _run(f"ip -n {name} link set {link} mtu 9000 up")
            if node.rate:
                shaped = f"rate {node.rate} burst {node.burst} latency 200ms"
                _run(f"ip netns exec {name} tc qdisc add dev {link} root tbf {shaped}")
        _run(f"ip -n {above} link set {port} master bridge")
        self.ports.append((above, port))
        if node.workers:
            number = len(self.servers)
            _run(f"ip -n {below} addr add 10.0.{number >> 8}.{number & 255}/16 dev {end}")
        else:
            _run(f"ip -n {below} link set {end} master bridge")

    def start(self, work: Callable[[], object], port: int) -> list[tuple[int, int]]:
        """Call `work` in one process per worker, with RANK and the like set; returns (process id, rank) of each.

        The processes are forked, so modules that they need should be imported before.
        """
        world = sum(workers for _, workers in self.servers)
        shared: dict[str, object] = {"WORLD_SIZE": world, "MASTER_PORT": port}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": False}  # worker 0 serves the store
        found: list[tuple[int, int]] = []
        for name, workers in self.servers:
            for local in range(workers):
                variables = {"RANK": len(found), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": workers, **shared}
                found.append((start_in_namespace(name, work, variables), len(found)))
        return found


def slow_down(network: Network, server: int, rate: str) -> None:
    """Limit what one server sends to a lower rate, in tc's notation."""
    name, _ = network.servers[server]
    _run(f"ip netns exec {name} tc qdisc replace dev {CABLE_INTERFACE} root tbf rate {rate} burst 64k latency 200ms")


def start_in_namespace(name: str, work: Callable[[], object], variables: Mapping[str, object] | None = None) -> int:
    """Call `work` in a new process in a namespace; returns the process id."""

    def enter_and_work() -> None:
        with (NAMES / name).open() as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        work()

    network = {"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": CABLE_INTERFACE}
    return fork_worker(enter_and_work, {**(variables or {}), **network})


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


_TRIED = (
    "mount -t tmpfs none /run",
    "ip link add one0 type veth peer name one1",
    "ip link add two type bridge",
    "tc qdisc add dev one0 root tbf rate 1gbit burst 64k latency 200ms",
    "sysctl -qw net.ipv4.tcp_congestion_control=reno",
)
"""What a network is made with."""


def check_requirements() -> None:
    """Raise `InputError` where this machine cannot emulate networks."""
    if why := missing_requirement():
        raise InputError(f"networks cannot be emulated here: {why}")


def missing_requirement() -> str:
    """The first missing requirement; empty where nothing is missing."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are of Linux; this is {sys.platform}"
    if missing := [name for name in ("unshare", "ip", "tc", "sysctl") if shutil.which(name) is None]:
        return f"the command {missing[0]} is missing"
    script = ["sh", "-c", " && ".join(_TRIED)]
    try:
        done = subprocess.run([*OWN_NAMESPACES, *script], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1] if done.returncode else ""
