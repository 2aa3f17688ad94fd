"""Notices that another server has restarted a worker of this attempt, which ends the attempt.

The peers of a dead worker usually notice, because their connections to it close. But if Gloo has received the beginning
of a message, it waits for the rest until its timeout: `Pair::signalException` wakes only those that wait for a message
to begin.
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
"""Time for workers that notice by themselves, since they can report the message for which they waited."""


def watch(attempt: Attempt, act: Callable[[], None]) -> None:
    """Start a thread that calls `act` once the attempt is over, if this worker has not noticed by itself.

    Does nothing where one launcher started all workers, since it ends them.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return
    threading.Thread(target=_watch, args=(attempt, act), daemon=True, name="succession").start()


def _watch(attempt: Attempt, act: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the main thread notices by itself that the store is lost
        while not _is_succeeded(attempt):
            time.sleep(EVERY_S)
        time.sleep(GRACE_S)
        act()


def _is_succeeded(attempt: Attempt) -> bool:
    with suppress(Unanswered):  # tries again until the connection is back
        return attempt.is_succeeded()
    return False
