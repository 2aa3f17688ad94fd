"""Who takes part in a survey: every worker says in the common store where it runs, and rank 0 waits for all.

here/RANK    that worker is there, and what it says of itself
go           all are: what they all said
missing      some did not come in time, or cannot take part
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.linkprobe.settings import Settings
from pipeplan_launch.transport import SHARED_MEMORY, explained, reason

POLL_S = 0.02
KNOCK_S = 0.1
GRACE_S = 3.0
"""How long after its own patience a worker still waits for rank 0 to say who is missing."""


class Silent(Exception):
    """Another worker says what is wrong."""


@dataclass(frozen=True)
class Hello:
    """What a worker says of itself."""

    place: str
    """The same for workers that can share memory."""
    machine: str
    """The same for workers on one machine, in whatever containers."""
    host: str
    device: str
    gpus: int
    facts: dict[str, str | int | float]


@dataclass(frozen=True)
class Meeting:
    """All workers, as one of them sees it."""

    store: Any
    rank: int
    hellos: tuple[Hello, ...]

    @property
    def world(self) -> int:
        """How many there are."""
        return len(self.hellos)

    @property
    def places(self) -> tuple[str, ...]:
        """Of every worker."""
        return tuple(hello.place for hello in self.hellos)

    @property
    def machines(self) -> tuple[str, ...]:
        """Of every worker."""
        return tuple(hello.machine for hello in self.hellos)


def hello(settings: Settings) -> Hello:
    """What this worker says. Raises `LaunchError` where it has no such device, or torch no such backend."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise LaunchError("this build of torch has no Gloo, through which messages and all-reduces between CPUs go")
    gpus = torch.cuda.device_count() if settings.device == "cuda" else 0
    if settings.device == "cuda" and not gpus:
        raise LaunchError(f"--device cuda: torch finds no CUDA device on {socket.gethostname()}; give --device cpu")
    boot, network = socket.gethostname(), ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = str(os.stat("/proc/self/ns/net").st_ino)
    place = f"{boot}/{network}/{os.getuid()}"
    return Hello(place, boot, socket.gethostname(), settings.device, gpus, dict(settings.facts))


def env_store(rank: int, timeout_s: float) -> Any:
    """The store where MASTER_ADDR and MASTER_PORT say, which rank 0 or torchrun's agent keeps.

    Raises `LaunchError` if it cannot be reached.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise LaunchError(
            f"{' and '.join(missing)} of rank 0 must be set beside RANK and WORLD_SIZE: start by torchrun"
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal() or int(port) > 65535:
        raise LaunchError(f"MASTER_PORT is {port!r}: it must be a port number")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = rank == 0 and not by_agent
    if not keeps:
        _await(address, int(port), timeout_s)
    try:
        store = tcp_store(address, int(port), timeout_s, keeps=keeps)
    except (RuntimeError, OSError, ValueError) as error:
        what = "listen" if keeps else "reach the workers' common store"
        raise LaunchError(f"rank {rank} cannot {what} at {address}, port {port}: {reason(error)}") from error
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(f"pipeplan-links/{attempt}", store)  # type: ignore[attr-defined]


def _await(address: str, port: int, timeout_s: float) -> None:
    """Until rank 0 listens there. torch would wait too, and print what it thinks of every attempt."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() + KNOCK_S > deadline:
                raise LaunchError(
                    f"rank 0 did not come within {timeout_s:g} s: nothing answers at {address}, port {port} "
                    f"({reason(error)})"
                ) from error
        time.sleep(KNOCK_S)


def tcp_store(address: str, port: int, timeout_s: float, *, keeps: bool, listening: int | None = None) -> Any:
    """torch's store of keys; who `keeps` it may have a socket that listens already. Raises what torch raises."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        None,
        keeps,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=listening is None,
        master_listen_fd=listening,
    )


def meet(store: Any, rank: int, world: int, mine: Hello | str, timeout_s: float) -> Meeting:
    """Wait until all are there; `mine` is text where this worker says why it cannot take part.

    Raises `LaunchError` at rank 0 if some do not come or cannot, `Silent` elsewhere.
    """
    deadline = time.monotonic() + timeout_s
    with explained("the workers' common store cannot be reached any more"):
        store.set(f"here/{rank}", json.dumps(mine if isinstance(mine, str) else asdict(mine)))
        if rank == 0:
            _call(store, world, deadline, timeout_s)
        while not store.check(["go"]):
            if store.check(["missing"]):
                raise Silent
            if time.monotonic() > deadline + GRACE_S:
                raise LaunchError(f"rank 0 did not come within {timeout_s:g} s; nothing was written")
            time.sleep(POLL_S)
        hellos = tuple(Hello(**one) for one in json.loads(store.get("go")))
    return Meeting(store, rank, hellos)


def _call(store: Any, world: int, deadline: float, timeout_s: float) -> None:
    missing = list(range(world))
    while missing:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if missing and time.monotonic() > deadline:
            _call_off(store)
            raise LaunchError(
                f"{listed(missing)} of {world} did not come within {timeout_s:g} s; nothing was written: start all, "
                "or wait longer with --timeout"
            )
        if missing:
            time.sleep(POLL_S)
    said = [json.loads(store.get(f"here/{rank}")) for rank in range(world)]
    for rank, one in enumerate(said):
        if isinstance(one, str):
            _call_off(store)
            raise LaunchError(one if rank == 0 else f"rank {rank}: {one}")
    store.set("go", json.dumps(said))


def _call_off(store: Any) -> None:
    """Let the others know, and give them time to: the store ends with this worker."""
    store.set("missing", "")
    time.sleep(10 * POLL_S)


def join(meeting: Meeting, timeout_s: float) -> tuple[torch.device, str]:
    """Make the process group of all: (this worker's device, the backend of all-reduces). Raises `LaunchError`."""
    mine = meeting.hellos[meeting.rank]
    kinds = sorted({hello.device for hello in meeting.hellos})
    if len(kinds) > 1:
        raise (LaunchError if meeting.rank == 0 else Silent)(
            f"some workers measure {kinds[0]} and some {kinds[1]}: give all of them the same --device"
        )
    if len(set(meeting.places)) == 1 and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as workers of one machine do in a run
    here = [rank for rank, place in enumerate(meeting.places) if place == mine.place]
    own_gpu = all(hello.gpus >= meeting.places.count(hello.place) for hello in meeting.hellos)
    device = torch.device("cpu")
    if mine.device == "cuda":
        device = torch.device("cuda", here.index(meeting.rank) % mine.gpus)
        torch.cuda.set_device(device)
        if own_gpu and not dist.is_nccl_available():
            raise LaunchError("this build of torch has no NCCL, by which GPUs reduce gradients in a run")
    backend = "nccl" if mine.device == "cuda" and own_gpu else "gloo"
    timeout = timedelta(seconds=timeout_s)
    with explained("the workers could not connect to each other"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
            store=dist.PrefixStore("group", meeting.store),  # type: ignore[attr-defined]
            rank=meeting.rank,
            world_size=meeting.world,
            timeout=timeout,
        )
    return device, backend


def shares_memory(device: torch.device) -> bool:
    """Whether workers of one place send through shared memory."""
    return device.type == "cpu" and hasattr(os, "memfd_create") and os.environ.get(SHARED_MEMORY) != "0"


def listed(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 2 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
