"""Finds out which worker was lost when the link benchmark fails, and which worker reports that.

The peers of a lost worker notice the loss, and their peers notice when these end; no worker knows from its own
connections who was lost first. So a worker that notices sets `fault` in the common store, and a thread of every worker
that is still alive answers there. A worker that does not answer was lost. Of those that answer, the one with the lowest
rank reports the loss.

    fault         set once a worker has noticed a failure
    alive/RANK    that worker is alive after the failure
    error/RANK    the error of a worker that caused the failure itself
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from pipeplan_launch.errors import LaunchError, PeerLost
from pipeplan_launch.link_benchmark.rendezvous import Participants, ReportedElsewhere, ranks_text

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
