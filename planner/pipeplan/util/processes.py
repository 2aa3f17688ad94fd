"""Child processes, and Ctrl-C while several problems are solved.

Processes are spawned, not forked, so that all platforms behave alike and no thread is copied. Child processes ignore
Ctrl-C; the process that started them ends them. A solver that is interrupted returns the best plan so far. After an
interrupt, code must not start solving further problems.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import FrameType


def processors() -> int:
    """The number of processors that this process may use."""
    # Not every platform can report the usable processors.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def spawned(most: int) -> Iterator[ProcessPoolExecutor]:
    """Yield an executor with at most `most` processes.

    Processes start when work is submitted, which must happen inside `interrupts_ignored`. After the block, the
    processes end when their work is done. If the block raised an exception (also for Ctrl-C), they are ended
    immediately.
    """
    executor = ProcessPoolExecutor(most, mp_context=multiprocessing.get_context("spawn"))
    before = {process.pid for process in multiprocessing.active_children()}
    try:
        yield executor
    except BaseException:
        for process in multiprocessing.active_children():
            if process.pid not in before:
                process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Make processes that start inside the block ignore Ctrl-C for good, because they inherit ignored signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


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

    # Signals reach only the main thread. A process that ignores Ctrl-C continues to ignore it.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield raise_if_interrupted
        return
    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
