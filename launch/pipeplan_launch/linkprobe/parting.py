"""When a survey fails: which worker was lost, and who says so.

The peers of a lost worker notice, the peers of these when they end, and nobody knows from its own connections who was
the first. So whoever notices says `fault` in the common store, a thread of every worker that still lives answers there,
and who does not answer was lost. Of those that answer the lowest speaks.

    fault         something failed
    alive/RANK    that worker is there after the fault
    error/RANK    what went wrong was its own doing, in words
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from pipeplan_launch.errors import LaunchError, PeerLost
from pipeplan_launch.linkprobe.meeting import Meeting, Silent, listed

LOOK_S = 0.25
ANSWER_S = 2.0
"""How long the others have to answer."""
END_S = 6.0
"""When a worker ends that is stuck in a receive."""
STATUS = 2


class Parting:
    """To be made as soon as all workers have met."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._over = threading.Event()
        self._noticed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="parting").start()

    def end(self) -> None:
        """All went well: nobody need answer any more."""
        self._over.set()

    def explain(self, error: LaunchError) -> LaunchError | Silent:
        """What this worker should raise in place of an error."""
        store, rank, world = self._meeting.store, self._meeting.rank, self._meeting.world
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
        except RuntimeError:  # the store is gone, and with it the worker that kept it
            if self._noticed.is_set():
                return Silent()  # that worker knew of the fault: it has said so, and ended
            here = [one for one in range(1, world) if self._meeting.places[one] == self._meeting.places[rank]]
            lost = PeerLost("rank 0 was lost while links were measured; nothing was written")
            return lost if rank in here[:1] else Silent()
        if guilty:
            return error if own and rank == guilty[0] else Silent()
        speaker = min(one for one in range(world) if one not in silent)
        if rank != speaker:
            return Silent()
        if not silent:
            return error
        who = f"{listed(silent)} {'was' if len(silent) == 1 else 'were'} lost"
        return PeerLost(f"{who} while links were measured; nothing was written")

    def _watch(self) -> None:
        store, rank = self._meeting.store.clone(), self._meeting.rank
        with suppress(RuntimeError):
            while not self._over.wait(LOOK_S):
                if store.check(["fault"]):
                    self._noticed.set()
                    store.set(f"alive/{rank}", "")
                    if not self._over.wait(END_S):
                        os._exit(STATUS)
