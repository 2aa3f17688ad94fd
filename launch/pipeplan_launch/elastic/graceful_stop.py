"""Graceful stop: after a request to any worker, all workers end a segment at the same minibatch.

A minibatch of a segment may begin if its index is below the segment's *grant*, a number in the store that all workers
share. A worker that reaches the end of the grant it knows looks the grant up and, if no other worker has, raises it by
about `GRANT_S` seconds of its own minibatches. Most minibatches therefore cost one comparison. A worker that is asked
to stop, or that learns at a look-up of a request to another worker, makes the grant final. No minibatch beyond it has
begun in any worker, so all of them end there. The first worker at the end of the segment closes the grant, unless it is
final; the others find the grant closed or final.

The grant is changed by the store's compare-and-set, and no worker waits for another.

    key             value
    stop            the launch's stop token (`launch_secret`), once a worker has been asked to stop
    grant/<n>       grant of the n-th segment: "12", "12 final" or "12 closed"
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from hmac import compare_digest

from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.elastic import signals
from pipeplan_launch.elastic.rendezvous import KeyValueStore
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.launch_secret import stop_token
from pipeplan_launch.plan.launch_plan import LaunchPlan

GRANT_S = 0.5
"""Time for which a worker raises the grant ahead of its own minibatches."""
STOP_KEY = "stop"
FINAL, CLOSED = "final", "closed"
_GRANT = re.compile(rf"(\d{{1,18}})(?: ({FINAL}|{CLOSED}))?")
MAX_GRANT = 10_000
"""Most minibatches by which a grant is raised at once."""


def forward_stop_requests(store: KeyValueStore) -> None:
    """Pass signals on to the workers that train, from a worker that does not belong to a stage."""

    def request() -> None:
        with suppress(RuntimeError):  # the store is lost, and the main thread will notice that
            store.set(STOP_KEY, stop_token(os.environ))

    signals.handle_requests_with(request)


class GracefulStop:
    """One worker's view of the grants. All active workers begin and end the same segments in the same order."""

    def __init__(self, store: KeyValueStore, plan: LaunchPlan, clock: Callable[[], float] = time.perf_counter) -> None:
        """`store`: the store with the keys of this attempt only. From now on a signal is a request to stop."""
        self._store = store
        self._token = stop_token(os.environ)
        self._group_size = (plan.accumulate or 1) if plan.schedule.accumulates else 1
        self._clock = clock
        self._segment = -1
        self._granted = 0
        self._end: int | None = None
        self._last_look_up = (0, 0.0)
        self._requested = False
        signals.handle_requests_with(self.request)

    def request(self) -> None:
        """Ask all workers to stop. May be called in another thread."""
        self._requested = True
        with suppress(RuntimeError):  # the store is lost, and the main thread will notice that
            self._store.set(STOP_KEY, self._token)

    def begin(self) -> None:
        """Begin the next segment."""
        self._segment += 1
        self._granted, self._end = 0, None
        self._last_look_up = (0, self._clock())

    def limit(self, index: int) -> int | None:
        """None if the minibatch with this index may begin, else the index at which all workers end the segment.

        To be used as `Engine.limit`.
        """
        if index < self._granted:
            return None
        self._look_up(index)
        return self._end if self._end is not None and index >= self._end else None

    def end(self) -> bool:
        """End a segment that has drained. Returns whether training stops here, the same in all workers."""
        granted, state = self._change(lambda granted: (granted, FINAL if self._stop_requested() else CLOSED))
        self._end = granted if state == FINAL else None
        return state == FINAL

    def reached(self, count: int) -> int:
        """Number of minibatches that were run of a segment of `count`, the same in all workers. Valid after `end`."""
        return count if self._end is None else min(count, self._end)

    def _look_up(self, index: int) -> None:
        step = self._step(index)

        def raise_grant(granted: int) -> tuple[int, str]:
            if self._stop_requested():
                return granted, FINAL
            wanted = index + step
            return max(granted, wanted + -wanted % self._group_size) if granted <= index else granted, ""

        granted, state = self._change(raise_grant)
        self._end = granted if state == FINAL else None
        self._granted = granted if state != CLOSED else 2**63  # another worker has reached the end of the segment

    def _step(self, index: int) -> int:
        """Number of minibatches that this worker runs in `GRANT_S`, by its pace since the last look-up."""
        now, (last_index, last) = self._clock(), self._last_look_up
        self._last_look_up = (index, now)
        if index <= last_index or now <= last:
            return 1
        return max(1, min(MAX_GRANT, int(GRANT_S * (index - last_index) / (now - last))))

    def _stop_requested(self) -> bool:
        """Whether this worker was asked to stop, or one that knows the launch's secret was."""
        if self._requested:
            return True
        return self._store.check([STOP_KEY]) and compare_digest(self._store.get(STOP_KEY), self._token.encode())

    def _change(self, change: Callable[[int], tuple[int, str]]) -> tuple[int, str]:
        """(grant, state) of the segment after applying `change`. A grant that is final or closed is not changed."""
        key = f"grant/{self._segment}"
        with peer_loss_explained("the workers' common store is gone"):
            before = self._store.compare_set(key, "", "0").decode("ascii", "replace")
            while True:
                number, state = _read_grant(before)
                if state:
                    return number, state
                granted, state = change(number)
                after = f"{granted} {state}".strip()
                if after == before:
                    return granted, state
                stored = self._store.compare_set(key, before, after).decode("ascii", "replace")
                if stored == after:
                    return granted, state
                before = stored


def _read_grant(value: str) -> tuple[int, str]:
    """(grant, state) from the store. Raises `LaunchError` if no worker of this launch can have written it."""
    match = _GRANT.fullmatch(value)
    if match is None:
        raise LaunchError(
            f"the workers' common store holds a wrong value, {value[:40]!r}: another program writes to it"
        )
    return int(match[1]), match[2] or ""
