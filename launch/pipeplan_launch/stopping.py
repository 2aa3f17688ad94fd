"""Bringing all workers to the same end of a segment, wherever a request to stop comes in, and whenever.

A minibatch of a segment may begin if its index is below the segment's *grant*, a number in the store that all workers
share. Whoever comes to the end of the grant that it knows looks it up, and raises it if nobody else has: by about
`AHEAD_S` of its own minibatches, so that asking costs a comparison nearly always. Whoever is asked to stop, or finds
at a look-up that another worker was, makes the grant final: no minibatch beyond it has begun anywhere, so all of them
end there. The first worker at the end of the segment closes it, or finds the grant final; the others find what it
found.

The store changes the grant by compare-and-set, and no worker waits for another.

    key             value
    stop            there, once a worker was asked to
    grant/<n>       of the n-th segment: "12", "12 final" or "12 closed"
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from pipeplan_launch import interrupt
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.gathering import Store
from pipeplan_launch.transport import explained

AHEAD_S = 0.5
STOP = "stop"
FINAL, CLOSED = "final", "closed"
MOST_AHEAD = 10_000


def pass_requests_on(store: Store) -> None:
    """In a worker that trains nothing: from now on a signal is a request to those that do."""

    def request() -> None:
        with suppress(RuntimeError):  # the store is gone: so are the others, which the main thread will find
            store.set(STOP, "")

    interrupt.gracefully(request)


class Stopping:
    """This worker's view of the grants. All active workers begin and end the same segments, in the same order."""

    def __init__(self, store: Store, plan: LaunchPlan, clock: Callable[[], float] = time.perf_counter) -> None:
        """`store`: of this attempt alone. From now on a signal is a request to stop."""
        self._store = store
        self._unit = (plan.accumulate or 1) if plan.schedule.accumulates else 1
        self._clock = clock
        self._segment = -1
        self._granted = 0
        self._end: int | None = None
        self._looked_up = (0, 0.0)
        self._requested = False
        interrupt.gracefully(self.request)

    def request(self) -> None:
        """Ask all workers to stop. May be called in another thread."""
        self._requested = True
        with suppress(RuntimeError):  # the store is gone: so are the others, which the main thread will find
            self._store.set(STOP, "")

    def begin(self) -> None:
        """A segment begins."""
        self._segment += 1
        self._granted, self._end = 0, None
        self._looked_up = (0, self._clock())

    def limit(self, index: int) -> int | None:
        """For `Engine.limit`: None if the minibatch with this index may begin, else the index where all workers end."""
        if index < self._granted:
            return None
        self._look_up(index)
        return self._end if self._end is not None and index >= self._end else None

    def end(self) -> bool:
        """The segment has been run, and drained. Whether all workers are to stop here: all are told the same."""
        granted, state = self._change(lambda granted: (granted, FINAL if self._asked() else CLOSED))
        self._end = granted if state == FINAL else None
        return state == FINAL

    def reached(self, count: int) -> int:
        """After `end`: how many minibatches all workers have run of a segment of `count`. The same for all of them,
        also where this worker had none that was left out."""
        return count if self._end is None else min(count, self._end)

    def _look_up(self, index: int) -> None:
        ahead = self._ahead(index)

        def raised(granted: int) -> tuple[int, str]:
            if self._asked():
                return granted, FINAL
            wanted = index + ahead
            return max(granted, wanted + -wanted % self._unit) if granted <= index else granted, ""

        granted, state = self._change(raised)
        self._end = granted if state == FINAL else None
        self._granted = granted if state != CLOSED else 2**63  # others have got to its end: it will be run whole

    def _ahead(self, index: int) -> int:
        """How many minibatches this worker runs in `AHEAD_S`, by its pace since the last look-up."""
        now, (then_index, then) = self._clock(), self._looked_up
        self._looked_up = (index, now)
        if index <= then_index or now <= then:
            return 1
        return max(1, min(MOST_AHEAD, int(AHEAD_S * (index - then_index) / (now - then))))

    def _asked(self) -> bool:
        return self._requested or self._store.check([STOP])

    def _change(self, change: Callable[[int], tuple[int, str]]) -> tuple[int, str]:
        """(grant, state) of the segment, after a change unless it has a state already, which is for good."""
        key = f"grant/{self._segment}"
        with explained("the workers' common store is gone"):
            before = self._store.compare_set(key, "", "0").decode()
            while True:
                number, _, state = before.partition(" ")
                if state:
                    return int(number), state
                granted, state = change(int(number))
                after = f"{granted} {state}".strip()
                if after == before:
                    return granted, state
                found = self._store.compare_set(key, before, after).decode()
                if found == after:
                    return granted, state
                before = found
