"""Searches for baselines in other processes, beside the solvers: neither needs what the other finds.

A process is given the problem and its cuts, and gives the baselines back, so these are the same wherever a search is
made. It is made here if no process was ready for it by the time its result is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pipeplan.planning.baselines import Baseline
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.known_answers import KNOWN
from pipeplan.util.deadline import Deadline
from pipeplan.util.processes import interrupts_ignored, spawned

LEAST_CELLS = 300
"""The least product of cuts and workers for which processes are started. Below it the searches mostly take less than
starting an interpreter, about half a second; from there on 0.2 to 5 seconds for the bundled profiles."""

Search = Callable[[Problem, Cuts, Deadline], list[Baseline]]


@dataclass(frozen=True)
class _Task:
    """A search of a problem, which may take a share of the time that is left when it begins."""

    search: Search
    problem: Problem
    cuts: Cuts
    ends: float | None
    """When no time is left, by `time.monotonic`, which all processes of a machine share; None for no limit."""
    share: float

    def run(self) -> list[Baseline]:
        """The baselines that the search finds."""
        left_s = None if self.ends is None else max(0.0, self.ends - time.monotonic())
        return self.search(self.problem, self.cuts, Deadline.after(left_s).share(self.share))


class SideSearches:
    """Searches that processes make one after another, as they become ready."""

    def __init__(self, executor: ProcessPoolExecutor, processes: int, problem: Problem, cuts: Cuts) -> None:
        self._executor, self._processes, self._problem, self._cuts = executor, processes, problem, cuts
        self._tasks: dict[Search, _Task] = {}
        self._waiting: list[Search] = []
        self._futures: dict[Search, Future[list[Baseline]]] = {}
        # The executor's thread gives a process its next search, while this thread may take that for itself.
        self._lock = threading.Lock()

    def start(self, searches: Sequence[Search], deadline: Deadline, share: float) -> None:
        """Start the processes, which take the searches in this order, each for a share of the time until a deadline."""
        ends = None if deadline.left_s is None else time.monotonic() + deadline.left_s
        self._tasks = {search: _Task(search, self._problem, self._cuts, ends, share) for search in searches}
        self._waiting = list(searches)
        with interrupts_ignored(), suppress(BrokenProcessPool):
            for _ in range(min(self._processes, len(searches))):
                self._executor.submit(_be_ready).add_done_callback(self._go_on)

    def found(self, search: Search) -> list[Baseline]:
        """The baselines of a search, made in a process, or here if none has begun it or its process was killed."""
        with self._lock:
            if search in self._waiting:
                self._waiting.remove(search)
            future = self._futures.get(search)
        if future is not None:
            with suppress(BrokenProcessPool):
                return future.result()
        return self._tasks[search].run()

    def _go_on(self, done: Future[Any]) -> None:
        """Give a process that is ready its next search, unless processes are being ended."""
        if done.cancelled() or done.exception() is not None:
            return
        with self._lock:
            if not self._waiting:
                return
            search = self._waiting[0]
            try:
                future = self._executor.submit(self._tasks[search].run)
            except RuntimeError:  # the executor was shut down in the meantime, or a process was killed
                return
            self._waiting.pop(0)
            self._futures[search] = future
        future.add_done_callback(self._go_on)


def _be_ready() -> None:
    """Nothing: a process that has done it has imported this module, and with it all that searches need."""


@contextmanager
def side_searches(problem: Problem, cuts: Cuts, jobs: int) -> Iterator[SideSearches | None]:
    """Yield what makes searches in up to `jobs` - 1 processes; None where a process would not pay.

    Nor may there be one where searches use what others have found, which a process does not know.
    """
    if jobs <= 1 or len(cuts.ideals) * problem.cluster.workers < LEAST_CELLS or KNOWN.get() is not None:
        yield None
        return
    with spawned(jobs - 1, at_once=True) as executor:
        yield SideSearches(executor, jobs - 1, problem, cuts)
