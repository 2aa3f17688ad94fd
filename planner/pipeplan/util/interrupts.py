"""Ctrl-C while several problems are solved.

A solver that is interrupted returns the best plan so far. Code that solves further problems must not go on with it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def remember_interrupt() -> Iterator[Callable[[], None]]:
    """Yield a function that raises `KeyboardInterrupt` if Ctrl-C came inside the block, even if a solver caught it."""
    interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    def raise_if_interrupted() -> None:
        if interrupted:
            raise KeyboardInterrupt

    # Signals only reach the main thread. A process that ignores Ctrl-C goes on ignoring it.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield raise_if_interrupted
        return
    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
