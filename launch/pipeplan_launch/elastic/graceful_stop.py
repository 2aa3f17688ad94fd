"""Graceful stop: after a request to any worker, all workers end a segment at the same minibatch.

A minibatch of a segment may begin if its index is below the segment's *grant*, a number in the store that all workers
share. A worker looks up the grant when the value that it knows lasts for only half of `GRANT_S`. If no other worker has
raised the grant, this worker raises it to cover its own minibatches of the next `GRANT_S` seconds. So most minibatches
cost only one comparison. A worker makes the grant final when it is asked to stop, or when a look-up shows that another
worker was asked. No worker has begun a minibatch beyond the grant, so all workers end there. The first worker at the
end of the segment closes the grant, unless the grant is final.

Workers change the grant by the store's compare-and-set, and never wait for each other. A look-up needs up to three
requests over a busy network, so it runs in another thread during training. A worker waits for its look-up only at the
end of the grant that it knows.

    key             value
    stop            the launch's stop token (`elastic.handshake`), once a worker has been asked to stop
    grant/<n>       grant of the n-th segment: "12", "12 final" or "12 closed"
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hmac import compare_digest

from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.elastic import signals
from pipeplan_launch.elastic.handshake import stop_token
from pipeplan_launch.elastic.store import StoreClient
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan

# Ends a worker that hangs: it runs a segment, but no action has ended for longer than any wait may take.
#
# Peers that wait for a tensor from such a worker give up after `--timeout`. Peers that wait at the end of a segment do
# not give up, because there a worker may wait for as long as the others compute.

GRACE_S = 2.0
"""Extra time before a hang is reported: an action whose own wait ends after `--timeout` can then report first."""


class HangWatch:
    """Watches the main thread of a worker from another thread."""

    def __init__(self, patience_s: float, act: Callable[[float], None]) -> None:
        """`act(seconds)` is called, in another thread, when an action has taken longer than `patience_s` and
        `GRACE_S`.
        """
        self._limit_s, self._act = patience_s + GRACE_S, act
        self._since: float | None = None
        threading.Thread(target=self._watch, daemon=True, name="hang-watch").start()

    def progress(self) -> None:
        """Note that an action has ended, or that the first action of a segment begins."""
        self._since = time.monotonic()

    def rest(self) -> None:
        """Note that the segment has ended: the time until the next one is not limited."""
        self._since = None

    def _watch(self) -> None:
        interval_s = min(1.0, self._limit_s / 10)
        while True:
            began = time.monotonic()
            time.sleep(interval_s)
            now, since = time.monotonic(), self._since
            if now - began > 2 * interval_s + 1.0:
                if since is not None:  # the whole process was suspended, so the action does not hang
                    self._since = now
            elif since is not None and now - since > self._limit_s:
                self._act(now - since)
                return


GRANT_S = 1.0
"""Seconds of its own minibatches for which a worker raises the grant. Half of this time is left for a look-up."""
STOP_KEY = "stop"
FINAL, CLOSED = "final", "closed"
_UNLIMITED = 2**63
_GRANT = re.compile(rf"(\d{{1,18}})(?: ({FINAL}|{CLOSED}))?")
MAX_GRANT = 10_000
"""Largest number of minibatches by which a grant is raised at once."""


def request_stop(store: StoreClient) -> None:
    """Ask all workers that train to stop. `store`: the store with the keys of this attempt only."""
    with suppress(RuntimeError):  # the store is lost, and the main thread will notice that
        store.set(STOP_KEY, stop_token(os.environ))


class GracefulStop:
    """One worker's view of the grants. All active workers begin and end the same segments in the same order."""

    def __init__(
        self,
        store: StoreClient,
        plan: LaunchPlan,
        clock: Callable[[], float] = time.perf_counter,
        begin_look_up: Callable[[Callable[[], None]], Future[None]] | None = None,
    ) -> None:
        """`store`: the store with the keys of this attempt only. From now on a signal is a request to stop.
        `begin_look_up` runs a function in parallel with the caller; None: in a thread.
        """
        self._store = store
        self._token = stop_token(os.environ)
        self._group_size = (plan.accumulate or 1) if plan.schedule.accumulates else 1
        self._clock = clock
        self._begin_look_up = begin_look_up or ThreadPoolExecutor(1, "grant").submit
        self._segment = -1
        self._granted = 0
        self._end: int | None = None
        self._look_up_at = 0
        """Index from which the grant is looked up again."""
        self._looking: Future[None] | None = None
        self._newest, self._stride = 0, 1
        """The largest index so far, and the largest step between two indices: the number of replicas."""
        self._last_look_up = (0, 0.0)
        self._requested = False
        signals.handle_requests_with(self.request)

    def request(self) -> None:
        """Ask all workers to stop. May be called in another thread."""
        self._requested = True
        request_stop(self._store)

    def begin(self) -> None:
        """Begin the next segment."""
        self._segment += 1
        self._granted, self._end, self._look_up_at = 0, None, 0
        self._newest, self._stride = 0, 1
        self._last_look_up = (0, self._clock())

    def limit(self, index: int) -> int | None:
        """None if the minibatch with this index may begin, else the index at which all workers end the segment.

        Used as `Engine.limit`.
        """
        self._stride = max(self._stride, index - self._newest)
        self._newest = max(self._newest, index)
        if index >= self._look_up_at and (self._looking is None or self._looking.done()):
            self._wait()
            self._look_ahead(index)
        if index < self._granted:
            return None
        self._wait()
        if index >= self._granted and self._end is None:
            self._look_ahead(index)
            self._wait()
        return self._end if self._end is not None and index >= self._end else None

    def end(self) -> bool:
        """End a segment that has drained. Returns whether training stops here, the same in all workers."""
        self._wait()
        granted, state = self._change(lambda granted: (granted, FINAL if self._stop_requested() else CLOSED))
        self._end = granted if state == FINAL else None
        return state == FINAL

    def reached(self, count: int) -> int:
        """Number of a segment's `count` minibatches that were run; the same in all workers. Valid after `end`."""
        return count if self._end is None else min(count, self._end)

    def _look_ahead(self, index: int) -> None:
        """Begin a look-up that may raise the grant, unless the grant is known to be final or closed."""
        if self._end is not None or self._granted == _UNLIMITED:
            return
        ahead = max(self._ahead(index), self._stride)
        self._look_up_at = index + 1  # until the look-up says more
        self._looking = self._begin_look_up(lambda: self._look_up(index, ahead))

    def _wait(self) -> None:
        """Wait for the look-up that has begun, if any."""
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.result()

    def _look_up(self, index: int, ahead: int) -> None:
        """Look the grant up, and raise it if it does not cover this minibatch and `ahead` more."""
        wanted = index + 1 + ahead

        def raise_grant(granted: int) -> tuple[int, str]:
            if self._stop_requested():
                return granted, FINAL
            return max(granted, wanted + -wanted % self._group_size), ""

        granted, state = self._change(raise_grant)
        # The other thread reads these without a lock: it must see the end of the segment before it sees the grant.
        self._end = granted if state == FINAL else None
        self._granted = granted if state != CLOSED else _UNLIMITED  # another worker has reached the end of the segment
        self._look_up_at = max(index + 1, granted - max(ahead // 2, self._stride))

    def _ahead(self, index: int) -> int:
        """Number of minibatches that this worker runs in `GRANT_S`, by its step time since the last look-up."""
        now, (last_index, last) = self._clock(), self._last_look_up
        self._last_look_up = (index, now)
        if index <= last_index or now <= last:
            return 1
        return max(1, min(MAX_GRANT, int(GRANT_S * (index - last_index) / (now - last))))

    def _stop_requested(self) -> bool:
        """Whether this worker, or another worker that knows the launch's secret, was asked to stop."""
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
