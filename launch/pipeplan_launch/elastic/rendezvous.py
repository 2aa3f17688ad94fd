"""Rendezvous for one restart attempt. Processes of the previous attempt may still be alive.

torchrun keeps one store for all attempts. If process groups find keys of the previous attempt there, they connect to
workers that are gone (pytorch/pytorch#135712). torchrun's count of restarts does not help, because every server counts
separately. So process 0 numbers the attempts, and announces when all processes of an attempt are present. The number is
a prefix of all keys of the attempt.

    attempt          number of the latest attempt, from 1
    N/here/PROCESS   location of a process that is present in attempt N
    N/go             locations of all processes: attempt N is complete, and no other process may join it
    N/left/WORKER    that worker has ended in an orderly way
    N/again          a worker of attempt N was restarted, so the attempt is over
    N/silent         description of the server whose launcher gave no sign of life
    N/fault          description of the first fault that a worker noticed
    run              the run folder, which the next attempt continues
    over             set after an error that a restart cannot cure

PROCESS is the launcher's rank of a process. The locations of all processes decide which worker of the plan a process
becomes (`pipeplan_launch.rank_mapping`). The next attempt may assign other workers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.elastic import restart_state
from pipeplan_launch.elastic.signals import check_interrupt
from pipeplan_launch.elastic.store import StoreClient, StoreTimeout, environment_store, open_store
from pipeplan_launch.errors import PeerLost, listed
from pipeplan_launch.rank_mapping.host_identity import (
    Location,
    location_json,
    locations_json,
    own_location,
    read_locations,
)

POLL_S = 0.01
OVER_KEY = "over"
STORE_LOST = "the workers' common store was lost"
LOST_MID_MESSAGE = "a worker was lost in the middle of a message"
MAX_TEXT_BYTES = 2000
_LOCAL_STORE_S = 10.0
WATCH_INTERVAL_S = 0.5
GRACE_S = 1.0
"""Time for workers to notice the restart by themselves. They can then report the message that they waited for."""


class LaunchOver(Exception):
    """Another worker has ended the launch for good and has reported why."""


@dataclass(frozen=True)
class Attempt:
    """One attempt, as seen by one of its workers."""

    number: int
    """Number of the attempt, from 1."""
    torch_store: Any
    """torch's store with the keys of this attempt only, for torch's own use."""
    launch_store: StoreClient
    """The store with the keys of all attempts."""
    rank: int
    """Rank of this process in the plan, or the launcher's rank until ranks are assigned."""
    world: int
    locations: tuple[Location, ...] = ()
    """Locations of all processes, by the launcher's rank."""

    @property
    def attempt_store(self) -> StoreClient:
        """The store with the keys of this attempt only."""
        store: StoreClient = _under(str(self.number), self.launch_store)
        return store

    def restart_prefix(self) -> str:
        """The fault and the number of the restart, as the beginning of a status line.

        "" in the first attempt, and until an attempt has reached its first minibatch.
        """
        fault = None if restart_state.only_start_ups() else self.last_fault()
        if fault is None:
            return ""
        return f"{fault}; restart {restart_state.restart_number()} of {restart_state.most_restarts()}: "

    def last_fault(self) -> str | None:
        """The reason why the previous attempt ended; None in the first attempt."""
        if self.number == 1:
            return None
        before = _under(str(self.number - 1), self.launch_store)
        if not before.check(["go"]):
            return "not all workers started"
        if before.check(["silent"]):
            return stored_text(before.get("silent"))
        lost = [rank for rank in range(self.world) if not before.check([f"left/{rank}"])]
        if lost:
            return f"{_workers_text(lost)} {'was' if len(lost) == 1 else 'were'} lost"
        return stored_text(before.get("fault")) if before.check(["fault"]) else "all workers ended"

    def leave(self, fault: str | None = None, over: bool = False) -> None:
        """Announce that this worker ends in an orderly way.

        `fault`: the fault that it noticed. `over`: whether the launch is over for good.
        """
        with suppress(RuntimeError):  # the fault may be the loss of the store itself
            if fault is not None:
                self.attempt_store.compare_set("fault", "", fault)
            if over:
                self.launch_store.set(OVER_KEY, "")
            self.attempt_store.set(f"left/{self.rank}", "")

    def remember_run(self, run: Path) -> None:
        """Remember the run folder for the next attempt, in which worker 0 may be on another server."""
        with peer_loss_explained(STORE_LOST):
            self.launch_store.set("run", str(run.resolve()))

    def previous_run(self) -> Path | None:
        """The run folder of the previous attempts; None if there is none."""
        with peer_loss_explained(STORE_LOST):
            if self.number == 1 or not self.launch_store.check(["run"]):
                return None
            return Path(self.launch_store.get("run").decode())

    def is_superseded(self) -> bool:
        """Whether another server has restarted a worker of this attempt. Raises `RuntimeError` if the store is lost."""
        return self.attempt_store.check(["again"]) or self.launch_store.add("attempt", 0) != self.number

    def silence(self) -> str | None:
        """The server that ended the attempt because it gave no sign of life; None if there is none."""
        return stored_text(self.attempt_store.get("silent")) if self.attempt_store.check(["silent"]) else None

    def store_place(self) -> str:
        """The host of server 0, which has the store, as part of a line; "" if it is the only server."""
        if len({location.server for location in self.locations}) < 2:
            return ""
        return f" on server 0 (host {self.locations[0].name})"

    def is_over(self) -> bool:
        """Whether a worker has ended the launch for good; False if the store does not answer."""
        with suppress(RuntimeError):  # the next attempt will find out
            return self.launch_store.check([OVER_KEY])
        return False

    def await_end(self, patience_s: float) -> None:
        """Wait until a worker has ended the launch for good, or `patience_s` seconds have passed."""
        deadline = time.monotonic() + patience_s
        while not self.is_over() and time.monotonic() < deadline:
            check_interrupt()
            time.sleep(POLL_S)


def join_attempt(timeout_s: float, cards: Sequence[str] = ()) -> Attempt:
    """Wait until all processes of an attempt are present. This process reads its rank from torchrun's environment.

    `cards`: UUIDs of the CUDA devices that this process sees, "" for a device without one. Raises `PeerLost` if some
    processes are not present in time, and `LaunchOver` if there will be no other attempt.
    """
    deadline = time.monotonic() + timeout_s
    with peer_loss_explained("the workers' common store could not be reached"):
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        base = environment_store(timedelta(seconds=timeout_s))
        launch_store = StoreClient(base, timeout_s).under("pipeplan")
        own_json = location_json(own_location(os.environ, cards))
        if rank:
            number = _join_attempt(launch_store, rank, deadline, own_json)
        else:
            number = _assemble_attempt(launch_store, world, deadline, own_json)
        locations = read_locations(launch_store.get(f"{number}/go"))
    return Attempt(number, _under(str(number), _under("pipeplan", base)), launch_store, rank, world, locations)


def _assemble_attempt(launch_store: StoreClient, world: int, deadline: float, own_location_json: str) -> int:
    """At process 0: begin an attempt, and wait until all processes are present. Returns its number."""
    number = launch_store.add("attempt", 1)
    missing = list(range(1, world))
    while missing:
        missing = [rank for rank in missing if not launch_store.check([f"{number}/here/{rank}"])]
        if missing:
            _pause(launch_store, deadline, partial(_absence, launch_store, number, missing))
    others = (launch_store.get(f"{number}/here/{rank}").decode() for rank in range(1, world))
    launch_store.set(f"{number}/go", locations_json([own_location_json, *others]))
    return number


def _join_attempt(launch_store: StoreClient, rank: int, deadline: float, own_location_json: str) -> int:
    """Join the current attempt, or the next attempt if the current one is complete. Returns the attempt's number."""
    joined = 0
    while True:
        number = launch_store.add("attempt", 0)
        complete = number > 0 and launch_store.check([f"{number}/go"])
        if complete and joined == number:
            return number
        if complete and joined < number:
            launch_store.set(f"{number}/again", "")
        if number > joined and not complete:
            launch_store.set(f"{number}/here/{rank}", own_location_json)
            joined = number
        _pause(launch_store, deadline, partial(_absence, launch_store, number, [0]))


def _absence(launch_store: StoreClient, number: int, missing: Sequence[int]) -> str:
    """The error line for workers that do not join an attempt, with what is known of them from the previous attempt."""
    before = _under(str(number - 1), launch_store)
    if number > 1 and before.check(["silent"]):
        return f"{_workers_text(missing)} did not come, after {stored_text(before.get('silent'))}"
    hosts = ""
    if number > 1 and before.check(["go"]):
        locations = read_locations(before.get("go"))
        names = dict.fromkeys(locations[rank].name for rank in missing if rank < len(locations))
        hosts = f" (before on {listed(names)})" if len({location.server for location in locations}) > 1 else ""
    return f"{_workers_text(missing)} did not come{hosts}"


def _pause(launch_store: StoreClient, deadline: float, late: Callable[[], str]) -> None:
    """Wait a moment. Raises `PeerLost` with the line of `late` if the time is up."""
    check_interrupt()
    if launch_store.check([OVER_KEY]):
        raise LaunchOver
    if time.monotonic() > deadline:
        raise PeerLost(late())
    time.sleep(POLL_S)


def _under(prefix: str, store: Any) -> Any:
    if isinstance(store, StoreClient):
        return store.under(prefix)
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _workers_text(ranks: Sequence[int]) -> str:
    """Format ranks as `worker 2` or `workers 2 and 3`."""
    return f"worker{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def end_attempt(store_port: int, fault: str, server: int | None = None) -> None:
    """In the launcher that serves the store: end the present attempt in all workers.

    `server`: the server that caused `fault`. The server's host and workers are added to the description.
    """
    launch_store = _under("pipeplan", open_store(store_port, timedelta(seconds=_LOCAL_STORE_S)))
    number = launch_store.add("attempt", 0)
    if number:
        attempt_store = _under(str(number), launch_store)
        if server is not None and attempt_store.check(["go"]):
            locations = read_locations(attempt_store.get("go"))
            here = [process for process, where in enumerate(locations) if where.launcher == str(server)]
            if here:
                workers = sorted(restart_state.worker_of(process) for process in here)
                fault += f" (host {locations[here[0]].name}, {_workers_text(workers)})"
        attempt_store.set("silent", fault)
        attempt_store.set("again", "")


def stored_text(value: bytes) -> str:
    """A line of text from the store, without control characters and of bounded length."""
    text = value[:MAX_TEXT_BYTES].decode("utf-8", "replace")
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def watch_for_restart(attempt: Attempt, act: Callable[[str], None]) -> None:
    """Start a thread that calls `act` if this attempt ends for a reason that this worker may not notice.

    `act` gets the reason: another server has restarted a worker, a server gives no sign of life, or the store does not
    answer.

    The peers of a dead worker usually notice, because their connections to it close. But if Gloo has received the
    beginning of a message, it waits for the rest until its timeout: `Pair::signalException` wakes only waits for the
    beginning of a message. Does nothing if one launcher started all workers, because that launcher ends them.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return
    threading.Thread(target=_watch, args=(attempt, act), daemon=True, name="restart-watch").start()


def _watch(attempt: Attempt, act: Callable[[str], None]) -> None:
    with suppress(RuntimeError):  # the main thread notices by itself that the store is lost
        try:
            while not attempt.is_superseded():
                time.sleep(WATCH_INTERVAL_S)
            reason = attempt.silence() or LOST_MID_MESSAGE
        except StoreTimeout as silence:  # the main thread may wait for a worker that waits for the store
            reason = f"the workers' common store{attempt.store_place()} is silent: {silence}"
        time.sleep(GRACE_S)
        act(reason)
