"""What this machine and this environment have, without torch."""

from __future__ import annotations

import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pipeplan._version import __version__
from pipeplan.doctor.finding import MISSING, OK, WARNING, Finding
from pipeplan.local import gpus, processors
from pipeplan.units import show_size

OLDEST = (3, 11)
LEAST_SHARED, LEAST_TEMPORARY, LEAST_HERE = 64 << 20, 64 << 20, 64 << 20
"""Bytes that should be free."""
PORTS = "MASTER_PORT"


def python() -> Finding:
    """The interpreter, and pipeplan itself."""
    version = platform.python_version()
    found = f"{version} at {sys.executable}, pipeplan {__version__}"
    if sys.version_info < OLDEST:  # an installation that ignored what pipeplan says it requires
        return Finding("Python", MISSING, found, "all of pipeplan", "install Python 3.11 or newer")
    return Finding("Python", OK, found, "all of pipeplan")


def devices() -> Finding:
    """What workers would compute on, as `--cluster local` has it."""
    cards, here = gpus(), processors()
    if cards:
        names = ", ".join(dict.fromkeys(card.name for card in cards))
        found = f"{len(cards)} × {names}, {show_size(cards[0].memory_bytes)} each"
    else:
        found = f"no NVIDIA GPU; {here.cores} processor core{'s' * (here.cores != 1)}, {show_size(here.memory_bytes)}"
    return Finding("devices", OK, found, "workers")


def folder(where: Path) -> Finding:
    """Whether profiles and plans can be written here, and how much."""
    try:
        with tempfile.TemporaryFile(dir=where):
            pass
        free = shutil.disk_usage(where).free
    except OSError as error:
        why = f"cannot write to {where}: {error.strerror or error}"
        return Finding("this folder", MISSING, why, "profiles, plans, runs", "go to a folder that is yours")
    found = f"{where} can be written to, {show_size(free)} free"
    if free < LEAST_HERE:
        return Finding("this folder", WARNING, found, "profiles, plans, checkpoints", "free some space")
    return Finding("this folder", OK, found, "profiles, plans, runs")


def temporary() -> Finding:
    """The folder for temporary files, which torchrun and solvers use."""
    need = "solvers, and starting workers"
    try:
        place = tempfile.gettempdir()
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding("temporary", MISSING, error.strerror or str(error), need, "set TMPDIR to a folder that is yours")
    found = f"{place}, {show_size(free)} free"
    if free < LEAST_TEMPORARY:
        return Finding("temporary", WARNING, found, need, "free some space, or set TMPDIR to a larger folder")
    return Finding("temporary", OK, found, need)


def shared_memory(place: Path = Path("/dev/shm")) -> Finding:
    """What processes that read minibatches ahead share them through."""
    need = "reading data ahead (Data(processes=…))"
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return Finding("shared memory", WARNING, f"there is no {place}", need, "mount a tmpfs there")
    found = f"{place}, {show_size(free)} free"
    if free < LEAST_SHARED:
        return Finding("shared memory", WARNING, found, need, "make it larger (in Docker: --shm-size=1g)")
    return Finding("shared memory", OK, found, need)


def ports(environment: Mapping[str, str]) -> Finding:
    """A port where workers can meet: the one that is set, else any."""
    need, given = "workers of several servers to meet at", environment.get(PORTS, "")
    if given and (not given.isdecimal() or not 0 < int(given) < 1 << 16):
        return Finding("ports", MISSING, f"{PORTS} is {given!r}, which is no port", need, "set it to 1024 to 65535")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", int(given or 0)))
            number = one.getsockname()[1]
    except OSError as error:
        what = f"{PORTS} {given} cannot be used: {error.strerror}" if given else f"no port is free: {error.strerror}"
        return Finding("ports", MISSING, what, need, f"set {PORTS} to another port, or end what uses it")
    free = f"{PORTS} {given} is free" if given else f"{number} is free, say, for {PORTS}"
    return Finding("ports", OK, f"{free}; whether other servers reach it, only they can tell", need)


def threads(environment: Mapping[str, str]) -> Finding:
    """Who says how many threads a worker computes with."""
    given, need = environment.get("OMP_NUM_THREADS", ""), "workers as fast as their profile says"
    if not given:
        return Finding("threads", OK, "OMP_NUM_THREADS is not set: launch.sh sets it as the profile has it", need)
    found = f"OMP_NUM_THREADS is {given}, and launch.sh keeps it"
    todo = f"unset it, or profile with --threads {given}, so that the prediction holds"
    return Finding("threads", WARNING, found, need, todo)
