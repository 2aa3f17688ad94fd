"""Rendezvous of the link benchmark: every worker writes its location to the common store, and rank 0 waits for all.

here/RANK    description of that worker, or the reason why it cannot take part
go           descriptions of all workers, once they are present
missing      set if some workers did not come in time or cannot take part
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeplan_launch.comm.p2p import error_cause, peer_loss_explained
from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.elastic.local_workers import stay_on_loopback
from pipeplan_launch.elastic.loopback_store import environment_store
from pipeplan_launch.errors import LaunchError, PeerLost, listed
from pipeplan_launch.link_benchmark.pair_schedule import BenchmarkSettings
from pipeplan_launch.rank_mapping.host_identity import machine_and_network
from pipeplan_launch.typed_document import shortened, whole_number

POLL_S = 0.02
KNOCK_S = 0.1
GRACE_S = 3.0
"""Time after its own timeout for which a worker waits for rank 0 to name the missing workers."""


class ReportedElsewhere(Exception):
    """Another worker reports the error."""


@dataclass(frozen=True)
class WorkerDescription:
    """Description of one worker."""

    place: str
    """Id of the place, equal for workers that can share memory."""
    machine: str
    """Id of the machine, equal for all its containers."""
    host: str
    device: str
    """`cpu` or `cuda`."""
    gpus: int
    """CUDA devices that the worker sees."""
    facts: dict[str, str | int | float]
    """Further facts for rank 0, as in `BenchmarkSettings.facts`."""


@dataclass(frozen=True)
class Participants:
    """All workers of the benchmark, as seen by one of them."""

    store: Any
    rank: int
    descriptions: tuple[WorkerDescription, ...]

    @property
    def world(self) -> int:
        """Number of workers."""
        return len(self.descriptions)

    @property
    def places(self) -> tuple[str, ...]:
        """`WorkerDescription.place` of every worker."""
        return tuple(description.place for description in self.descriptions)

    @property
    def machines(self) -> tuple[str, ...]:
        """`WorkerDescription.machine` of every worker."""
        return tuple(description.machine for description in self.descriptions)


def describe_worker(settings: BenchmarkSettings) -> WorkerDescription:
    """The description of this worker. Raises `LaunchError` if it lacks the device, or torch lacks the backend."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise LaunchError("this build of torch has no Gloo, through which messages and all-reduces between CPUs go")
    gpus = len(backend_of(settings.device).cards())
    if settings.device == "cuda" and not gpus:
        raise LaunchError(f"--device cuda: torch finds no CUDA device on {socket.gethostname()}; give --device cpu")
    machine, network = machine_and_network()
    place = f"{machine}/{network}/{os.getuid()}"
    return WorkerDescription(place, machine, socket.gethostname(), settings.device, gpus, dict(settings.facts))


def env_store(rank: int, timeout_s: float) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, which rank 0 or torchrun's agent keeps.

    Raises `LaunchError` if it cannot be reached.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise LaunchError(
            f"{' and '.join(missing)} of rank 0 must be set beside RANK and WORLD_SIZE: start by torchrun"
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if (whole_number(port) or 1 << 16) > 65535:
        raise LaunchError(f"MASTER_PORT is {shortened(port)}: it must be a port number")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = rank == 0 and not by_agent
    if not keeps:
        _await(address, int(port), timeout_s)
    try:
        store = environment_store(timedelta(seconds=timeout_s))
    except (RuntimeError, OSError, ValueError) as error:
        action = "listen" if keeps else "reach the workers' common store"
        raise LaunchError(f"rank {rank} cannot {action} at {address}, port {port}: {error_cause(error)}") from error
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(f"pipeplan-links/{attempt}", store)  # type: ignore[attr-defined]


def _await(address: str, port: int, timeout_s: float) -> None:
    """Wait until rank 0 listens at this address. torch would wait too, but print a message for every attempt."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() + KNOCK_S > deadline:
                raise LaunchError(
                    f"rank 0 did not come within {timeout_s:g} s: nothing answers at {address}, port {port} "
                    f"({error_cause(error)})"
                ) from error
        time.sleep(KNOCK_S)


def meet_workers(store: Any, rank: int, world: int, mine: WorkerDescription | str, timeout_s: float) -> Participants:
    """Wait until all workers are present. `mine`: this worker's description, or the reason why it cannot take part.

    If some workers do not come or cannot take part, raises `LaunchError` at rank 0 and `ReportedElsewhere` elsewhere.
    """
    deadline = time.monotonic() + timeout_s
    with peer_loss_explained("the workers' common store cannot be reached any more"):
        store.set(f"here/{rank}", json.dumps(mine if isinstance(mine, str) else asdict(mine)))
        if rank == 0:
            _await_all(store, world, deadline, timeout_s)
        while not store.check(["go"]):
            if store.check(["missing"]):
                raise ReportedElsewhere
            if time.monotonic() > deadline + GRACE_S:
                raise LaunchError(f"rank 0 did not come within {timeout_s:g} s; nothing was written")
            time.sleep(POLL_S)
        descriptions = tuple(WorkerDescription(**one) for one in json.loads(store.get("go")))
    return Participants(store, rank, descriptions)


def _await_all(store: Any, world: int, deadline: float, timeout_s: float) -> None:
    """At rank 0: wait for all workers, then announce their descriptions."""
    missing = list(range(world))
    while missing:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if missing and time.monotonic() > deadline:
            _announce_failure(store)
            raise LaunchError(
                f"{ranks_text(missing)} of {world} did not come within {timeout_s:g} s; nothing was written: start "
                "all, or wait longer with --timeout"
            )
        if missing:
            time.sleep(POLL_S)
    answers = [json.loads(store.get(f"here/{rank}")) for rank in range(world)]
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            _announce_failure(store)
            raise LaunchError(answer if rank == 0 else f"rank {rank}: {answer}")
    store.set("go", json.dumps(answers))


def _announce_failure(store: Any) -> None:
    """Announce the failure, and give the others time to read it, since the store ends with this worker."""
    store.set("missing", "")
    time.sleep(10 * POLL_S)


def join_process_group(participants: Participants, timeout_s: float) -> tuple[torch.device, str]:
    """Make the process group of all workers; returns (this worker's device, the backend of all-reduces).

    Raises `LaunchError`, or `ReportedElsewhere` where rank 0 reports the error.
    """
    mine = participants.descriptions[participants.rank]
    kinds = sorted({description.device for description in participants.descriptions})
    if len(kinds) > 1:
        raise (LaunchError if participants.rank == 0 else ReportedElsewhere)(
            f"some workers measure {kinds[0]} and some {kinds[1]}: give all of them the same --device"
        )
    if len(set(participants.places)) == 1:
        stay_on_loopback(os.environ)  # workers of one machine do the same in a run
    here = [rank for rank, place in enumerate(participants.places) if place == mine.place]
    own_gpu = all(
        description.gpus >= participants.places.count(description.place) for description in participants.descriptions
    )
    backend = backend_of(mine.device)
    device = backend.select(here.index(participants.rank))
    names = backend.process_groups(own_gpu)
    if "nccl" in names and not dist.is_nccl_available():
        raise LaunchError("this build of torch has no NCCL, by which GPUs reduce gradients in a run")
    timeout = timedelta(seconds=timeout_s)
    with peer_loss_explained("the workers could not connect to each other"):
        dist.init_process_group(
            names,
            store=dist.PrefixStore("group", participants.store),  # type: ignore[attr-defined]
            rank=participants.rank,
            world_size=participants.world,
            timeout=timeout,
        )
    return device, "nccl" if "nccl" in names else "gloo"


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 2` or `ranks 2 and 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


# Finds out which worker was lost when the link benchmark fails, and which worker reports that.
#
# The peers of a lost worker notice the loss, and their peers notice when these end; no worker knows from its own
# connections who was lost first. So a worker that notices sets `fault` in the common store, and a thread of every
# worker that is still alive answers there. A worker that does not answer was lost. Of those that answer, the one with
# the lowest rank reports the loss.
#
# fault set once a worker has noticed a failure alive/RANK that worker is alive after the failure error/RANK the error
# of a worker that caused the failure itself

LOOK_S = 0.25
ANSWER_S = 2.0
"""Time for the other workers to answer."""
END_S = 6.0
"""Time after which a worker that is stuck in a receive is ended."""
STATUS = 2


class LossDetector:
    """Watches for failures. Every worker creates one as soon as all of them have met."""

    def __init__(self, participants: Participants) -> None:
        self._participants = participants
        self._over = threading.Event()
        self._noticed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="loss-detector").start()

    def end(self) -> None:
        """Stop watching, after the benchmark has succeeded."""
        self._over.set()

    def explain(self, error: LaunchError) -> LaunchError | ReportedElsewhere:
        """The exception that this worker should raise in place of `error`."""
        store, rank, world = self._participants.store, self._participants.rank, self._participants.world
        own = not isinstance(error, PeerLost)
        try:
            if own:
                store.set(f"error/{rank}", str(error))
            store.set(f"alive/{rank}", "")
            store.set("fault", "")
            deadline = time.monotonic() + ANSWER_S
            silent = list(range(world))
            while silent and time.monotonic() < deadline:
                time.sleep(LOOK_S / 5)
                silent = [one for one in silent if not store.check([f"alive/{one}"])]
            guilty = [one for one in range(world) if store.check([f"error/{one}"])]
        except RuntimeError:  # the store is gone, and with it rank 0, which kept it
            if self._noticed.is_set():
                return ReportedElsewhere()  # rank 0 knew of the fault, so it has reported the fault before it ended
            local = [
                one for one in range(1, world) if self._participants.places[one] == self._participants.places[rank]
            ]
            lost = PeerLost("rank 0 was lost while links were measured; nothing was written")
            return lost if rank in local[:1] else ReportedElsewhere()
        if guilty:
            return error if own and rank == guilty[0] else ReportedElsewhere()
        reporter = min(one for one in range(world) if one not in silent)
        if rank != reporter:
            return ReportedElsewhere()
        if not silent:
            return error
        loss = f"{ranks_text(silent)} {'was' if len(silent) == 1 else 'were'} lost"
        return PeerLost(f"{loss} while links were measured; nothing was written")

    def _watch(self) -> None:
        store, rank = self._participants.store.clone(), self._participants.rank
        with suppress(RuntimeError):
            while not self._over.wait(LOOK_S):
                if store.check(["fault"]):
                    self._noticed.set()
                    store.set(f"alive/{rank}", "")
                    if not self._over.wait(END_S):
                        os._exit(STATUS)
