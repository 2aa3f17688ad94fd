"""The requirements of replays on this machine."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

from pipeplan.errors import InputError
from pipeplan_launch.emulation.network_namespaces import OWN_NAMESPACES

_COMMANDS = (
    ("mount -t tmpfs none /run", "a mount in a namespace of its own"),
    ("ip link add one0 type veth peer name one1", "virtual cables (the kernel's veth)"),
    ("ip link add two type bridge", "virtual switches (the kernel's bridge)"),
    ("tc qdisc add dev one0 root tbf rate 1gbit burst 64k latency 200ms", "shaped links (the kernel's sch_tbf)"),
    ("sysctl -qw net.ipv4.tcp_congestion_control=reno", "TCP reno (net.ipv4.tcp_available_congestion_control)"),
)


_PROCESSES = ("mount -t proc proc /proc", "a /proc of its own")


def check_requirements(processes: bool = False) -> None:
    """Raise `InputError` where this machine cannot replay plans. Launchers also need `processes` of their own."""
    if why := missing_requirement(processes):
        raise InputError(f"plans cannot be replayed here: {why}")


def missing_requirement(processes: bool = False) -> str:
    """The first missing requirement and its remedy; empty where nothing is missing."""
    commands = (*_COMMANDS, _PROCESSES) if processes else _COMMANDS
    if not sys.platform.startswith("linux"):
        return f"replays need network namespaces of Linux; this is {sys.platform}; replay on a Linux machine"
    for command, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2"), ("sysctl", "procps")):
        if shutil.which(command) is None:
            return f"the command {command} is missing; install the package {package}"
    if importlib.util.find_spec("torch") is None:
        return "the executor needs torch, which is not installed; pip install 'pipeplan[torch]'"
    if why := _try("true"):
        return f"this system allows no namespaces without root ({why}); run it as root, or allow them"
    if _try(" && ".join(command for command, _ in commands)):
        for number, (_, feature) in enumerate(commands):
            if why := _try(" && ".join(command for command, _ in commands[: number + 1])):
                return f"this system does not allow {feature}: {why}; replay on another machine"
    return ""


def _try(script: str) -> str:
    """The error of a script in namespaces of its own; empty if it succeeds."""
    try:
        done = subprocess.run(
            [*OWN_NAMESPACES, "sh", "-c", script], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return lines[-1] if done.returncode else ""
