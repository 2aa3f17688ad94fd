"""A finding of `pipeplan doctor`, and the checks of this machine and its environment that do without torch."""

from __future__ import annotations

import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeplan._version import __version__
from pipeplan.cluster_data.local import local_gpus, local_processors
from pipeplan.util.typed import shortened, whole_number
from pipeplan.util.units import show_size

OK, WARNING, MISSING = "ok", "warning", "missing"
OLDEST = (3, 11)
LEAST_SHARED, LEAST_TEMPORARY, LEAST_HERE = 64 << 20, 64 << 20, 64 << 20
"""Bytes that should be free in shared memory, in the temporary folder, and in the current folder."""
PORTS = "MASTER_PORT"


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check, in plain words."""

    name: str
    state: str
    """`ok`; `missing` if a main purpose of pipeplan does not work; `warning` if something works less well, or a single
    command does not work."""
    found: str
    needed_for: str
    todo: str = ""
    """Advice for the user; empty for the state `ok`."""

    def to_json(self) -> dict[str, str]:
        """All fields by name."""
        return asdict(self)


def check_python() -> DoctorFinding:
    """The versions of the interpreter and of pipeplan."""
    version = platform.python_version()
    found = f"{version} at {sys.executable}, pipeplan {__version__}"
    if sys.version_info < OLDEST:  # the installation ignored pipeplan's metadata
        return DoctorFinding("Python", MISSING, found, "all of pipeplan", "install Python 3.11 or newer")
    return DoctorFinding("Python", OK, found, "all of pipeplan")


def check_devices() -> DoctorFinding:
    """The devices of workers, as in `--cluster local`."""
    cards, here = local_gpus(), local_processors()
    if cards:
        names = ", ".join(dict.fromkeys(card.name for card in cards))
        found = f"{len(cards)} × {names}, {show_size(cards[0].memory_bytes)} each"
    else:
        found = f"no NVIDIA GPU; {here.cores} processor core{'s' * (here.cores != 1)}, {show_size(here.memory_bytes)}"
    return DoctorFinding("devices", OK, found, "workers")


def check_folder(where: Path) -> DoctorFinding:
    """Whether profiles and plans can be written to a folder, and its free space."""
    try:
        with tempfile.TemporaryFile(dir=where):
            pass
        free = shutil.disk_usage(where).free
    except OSError as error:
        why = f"cannot write to {where}: {error.strerror or error}"
        return DoctorFinding(
            "this folder", MISSING, why, "profiles, plans, runs", "change to a folder that you can write to"
        )
    found = f"{where} can be written to, {show_size(free)} free"
    if free < LEAST_HERE:
        return DoctorFinding("this folder", WARNING, found, "profiles, plans, checkpoints", "free some space")
    return DoctorFinding("this folder", OK, found, "profiles, plans, runs")


def check_temporary_folder() -> DoctorFinding:
    """The folder for temporary files, which torchrun and solvers use."""
    need = "solvers, and starting workers"
    try:
        place = tempfile.gettempdir()
        free = shutil.disk_usage(place).free
    except OSError as error:
        return DoctorFinding(
            "temporary", MISSING, error.strerror or str(error), need, "set TMPDIR to a folder that you can write to"
        )
    found = f"{place}, {show_size(free)} free"
    if free < LEAST_TEMPORARY:
        return DoctorFinding("temporary", WARNING, found, need, "free some space, or set TMPDIR to a larger folder")
    return DoctorFinding("temporary", OK, found, need)


def check_shared_memory(place: Path = Path("/dev/shm")) -> DoctorFinding:
    """The shared memory through which processes that prefetch minibatches hand them over."""
    need = "prefetching data (Data(processes=…))"
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return DoctorFinding("shared memory", WARNING, f"there is no {place}", need, "mount a tmpfs there")
    found = f"{place}, {show_size(free)} free"
    if free < LEAST_SHARED:
        return DoctorFinding("shared memory", WARNING, found, need, "make it larger (in Docker: --shm-size=1g)")
    return DoctorFinding("shared memory", OK, found, need)


def check_port(environment: Mapping[str, str]) -> DoctorFinding:
    """A port for the rendezvous of workers: the one in MASTER_PORT, else any free one."""
    need, value = "the rendezvous of workers on several servers", environment.get(PORTS, "")
    if value and (not 0 < (whole_number(value) or 0) < 1 << 16):
        return DoctorFinding(
            "ports", MISSING, f"{PORTS} is {shortened(value)}, which is no port", need, "set it to 1024 to 65535"
        )
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", int(value or 0)))
            number = server.getsockname()[1]
    except OSError as error:
        what = f"{PORTS} {value} cannot be used: {error.strerror}" if value else f"no port is free: {error.strerror}"
        return DoctorFinding(
            "ports", MISSING, what, need, f"set {PORTS} to another port, or end the process that uses it"
        )
    free = f"{PORTS} {value} is free" if value else f"port {number} is free, for example for {PORTS}"
    return DoctorFinding("ports", OK, f"{free}; only other servers can tell whether they reach it", need)


def check_threads(environment: Mapping[str, str]) -> DoctorFinding:
    """Whether OMP_NUM_THREADS overrides the number of threads that the profile was measured with."""
    value, need = environment.get("OMP_NUM_THREADS", ""), "workers that are as fast as their profile says"
    if not value:
        return DoctorFinding(
            "threads", OK, "OMP_NUM_THREADS is not set: launch.sh sets it to the threads of the profile", need
        )
    found = f"OMP_NUM_THREADS is {value}, and launch.sh keeps it"
    todo = f"unset it, or profile with --threads {value}, so that the prediction holds"
    return DoctorFinding("threads", WARNING, found, need, todo)
