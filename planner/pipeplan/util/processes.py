"""Processes that compute beside this one.

They are spawned, not forked, so that all platforms behave alike and no thread is copied. They ignore Ctrl-C; the
process that started them ends them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


def processors() -> int:
    """The number of processors that this process may use."""
    # Not every platform can say which ones.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def spawned(
    most: int, initializer: Callable[[], None] | None = None, *, at_once: bool = False
) -> Iterator[ProcessPoolExecutor]:
    """Yield an executor with at most so many processes, each of which begins with `initializer`.

    Processes start when work is submitted, which has to be under `interrupts_ignored`. After the block they end: with
    `at_once`, or if it raised anything, Ctrl-C included, whatever they are doing; else when their work is done.
    """
    executor = ProcessPoolExecutor(most, mp_context=multiprocessing.get_context("spawn"), initializer=initializer)
    before = {process.pid for process in multiprocessing.active_children()}
    try:
        yield executor
    except BaseException:
        at_once = True
        raise
    finally:
        if at_once:
            for process in multiprocessing.active_children():
                if process.pid not in before:
                    process.terminate()
        executor.shutdown(cancel_futures=True)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Make processes that are started inside ignore Ctrl-C for good, because they inherit ignored signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
