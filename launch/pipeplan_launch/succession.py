"""Noticing that another server has started a worker of this attempt again, which then is over.

Its peers mostly notice by themselves that a worker died: their connections to it close. But where Gloo had received the
beginning of a message, it waits for the rest until its timeout (`Pair::signalException` tells those that wait for a
message to begin, and no others).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pipeplan_launch.asking import Unanswered
from pipeplan_launch.gathering import Attempt

EVERY_S = 0.5
GRACE_S = 1.0
"""For those that notice by themselves, and can say what they waited for."""


def watch(attempt: Attempt, act: Callable[[], None]) -> None:
    """Have a thread call `act` once the attempt is known to be over, and nobody has noticed.

    Not needed where all workers are of one launcher, which ends them.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return
    threading.Thread(target=_watch, args=(attempt, act), daemon=True, name="succession").start()


def _watch(attempt: Attempt, act: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the store is lost: so much the main thread finds out
        while not _is_succeeded(attempt):
            time.sleep(EVERY_S)
        time.sleep(GRACE_S)
        act()


def _is_succeeded(attempt: Attempt) -> bool:
    with suppress(Unanswered):  # until the link is back
        return attempt.is_succeeded()
    return False
