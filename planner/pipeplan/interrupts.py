"""Ctrl-C where several problems are solved: a solver that it interrupts ends with the best plan so far, which is no
answer to go on with.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted() -> Iterator[Callable[[], None]]:
    """The function that it gives raises `KeyboardInterrupt` if Ctrl-C has come inside, whoever caught it."""
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(number, frame)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    # Elsewhere than in the main thread there is nothing to interrupt; where it is ignored, it stays so.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield check
        return
    usual = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, usual)
