"""Which workers belong to the same attempt: after a fault, those of the last one may still be about.

torchrun keeps one store for all attempts, and where it is given, the keys of the last attempt are found by the next:
process groups then connect to workers that are gone (pytorch/pytorch#135712). Its count of restarts does not help
where several servers count for themselves. So rank 0 numbers the attempts here, everyone has its keys under that
number, and rank 0 says when all are there.

    attempt          the number of the latest, from 1
    N/here/PROCESS   that process is in attempt N, and where it is
    N/go             all are, and where they are: nobody else may come
    N/left/WORKER    that worker ended of its own accord
    N/again          one of its workers was started again: N is over
    N/fault          the first sign of a fault that a worker noticed, in words
    run              the run folder: the next attempt goes on with it
    over             an error that starting again cannot cure

A process has the number that its launcher gave it, the rank; which worker of the plan it is follows from where all are
(`pipeplan_launch.placement`), and may be another one in the next attempt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pipeplan_launch import restarts
from pipeplan_launch.asking import Asked
from pipeplan_launch.errors import PeerLost
from pipeplan_launch.interrupt import check_interrupt
from pipeplan_launch.placement.where import Where, all_read, all_written, here, written
from pipeplan_launch.transport import explained

POLL_S = 0.01
OVER = "over"
STORE_LOST = "the workers' common store was lost"


class Store(Protocol):
    """What is used of torch's store of keys, which all workers share."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """A value; waits for it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, 0 if it was not there; returns the sum."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value if it is the expected one, or if there is none and "" is expected; returns what is there then."""


class AllOver(Exception):
    """Another worker has ended the launch for good, and said why."""


@dataclass(frozen=True)
class Attempt:
    """One attempt, as one of its workers sees it."""

    number: int
    """From 1."""
    store: Any
    """torch's store, with the keys of this attempt alone, for torch's own use."""
    launch: Store
    """Keys of all attempts."""
    rank: int
    """Which worker of the plan this is; of a process that does not know yet, its own number."""
    world: int
    wheres: tuple[Where, ...] = ()
    """Where all processes are, by their numbers."""

    @property
    def keys(self) -> Store:
        """Of this attempt alone."""
        keys: Store = _under(str(self.number), self.launch)
        return keys

    def after_fault(self) -> str:
        """What a line that says where this attempt begins begins with: nothing in the first."""
        fault = self.last_fault()
        if fault is None:
            return ""
        return f"{fault}; restart {restarts.restart_number()} of {restarts.most_restarts()}: "

    def last_fault(self) -> str | None:
        """Why the attempt before this one ended; None in the first."""
        if self.number == 1:
            return None
        before = _under(str(self.number - 1), self.launch)
        if not before.check(["go"]):
            return "not all workers started"
        lost = [rank for rank in range(self.world) if not before.check([f"left/{rank}"])]
        if lost:
            return f"{_listed(lost)} {'was' if len(lost) == 1 else 'were'} lost"
        return before.get("fault").decode() if before.check(["fault"]) else "all workers ended"

    def leave(self, fault: str | None = None, over: bool = False) -> None:
        """This worker ends of its own accord: of a fault that it noticed, or for good."""
        with suppress(RuntimeError):  # the store itself may be what is lost
            if fault is not None:
                self.keys.compare_set("fault", "", fault)
            if over:
                self.launch.set(OVER, "")
            self.keys.set(f"left/{self.rank}", "")

    def remember_run(self, run: Path) -> None:
        """For the next attempt, whichever process is worker 0 then, on whichever server."""
        with explained(STORE_LOST):
            self.launch.set("run", str(run.resolve()))

    def run_before(self) -> Path | None:
        """The run folder of the attempts before; None where there was none yet."""
        with explained(STORE_LOST):
            if self.number == 1 or not self.launch.check(["run"]):
                return None
            return Path(self.launch.get("run").decode())

    def is_succeeded(self) -> bool:
        """Whether a worker of this attempt was started again, on another server. Raises `RuntimeError`."""
        return self.keys.check(["again"]) or self.launch.add("attempt", 0) != self.number

    def is_over(self) -> bool:
        """Whether a worker is known to have ended the launch for good."""
        with suppress(RuntimeError):  # cut off: the next attempt finds out
            return self.launch.check([OVER])
        return False

    def await_end(self, patience_s: float) -> None:
        """Until a worker has ended the launch for good, if one does in time."""
        deadline = time.monotonic() + patience_s
        while not self.is_over() and time.monotonic() < deadline:
            check_interrupt()
            time.sleep(POLL_S)


def gather(timeout_s: float, cards: Sequence[str] = ()) -> Attempt:
    """Wait until all processes of an attempt are there, as the environment that torchrun sets says who they are.

    `cards`: the UUIDs of the CUDA devices that this one sees, "" for one that has none.

    Raises `PeerLost` if some are not there in time, `AllOver` if there is to be no other attempt.
    """
    deadline = time.monotonic() + timeout_s
    with explained("the workers' common store could not be reached"):
        base, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        asked = Asked(base, timeout_s).under("pipeplan")
        mine = written(here(os.environ, cards))
        number = _come(asked, rank, deadline, mine) if rank else _call_together(asked, world, deadline, mine)
        wheres = all_read(asked.get(f"{number}/go").decode())
    return Attempt(number, _under(str(number), _under("pipeplan", base)), asked, rank, world, wheres)


def _call_together(launch: Store, world: int, deadline: float, mine: str) -> int:
    number = launch.add("attempt", 1)
    missing = list(range(1, world))
    while missing:
        missing = [rank for rank in missing if not launch.check([f"{number}/here/{rank}"])]
        if missing:
            _pause(launch, deadline, f"{_listed(missing)} did not come")
    others = (launch.get(f"{number}/here/{rank}").decode() for rank in range(1, world))
    launch.set(f"{number}/go", all_written([mine, *others]))
    return number


def _come(launch: Store, rank: int, deadline: float, mine: str) -> int:
    """A worker that finds an attempt which went without it waits for the next."""
    joined = 0
    while True:
        number = launch.add("attempt", 0)
        went = number > 0 and launch.check([f"{number}/go"])
        if went and joined == number:
            return number
        if went and joined < number:
            launch.set(f"{number}/again", "")
        if number > joined and not went:
            launch.set(f"{number}/here/{rank}", mine)
            joined = number
        _pause(launch, deadline, "worker 0 did not come")


def _pause(launch: Store, deadline: float, late: str) -> None:
    check_interrupt()
    if launch.check([OVER]):
        raise AllOver
    if time.monotonic() > deadline:
        raise PeerLost(late)
    time.sleep(POLL_S)


def _under(prefix: str, store: Any) -> Any:
    if isinstance(store, Asked):
        return store.under(prefix)
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _listed(ranks: Sequence[int]) -> str:
    """`worker 2`, or `workers 2 and 3`."""
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
