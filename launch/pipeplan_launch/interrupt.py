"""SIGINT and SIGTERM in a worker: noted when they come, acted upon where nothing is half done.

Before training, a request ends the worker: there is nothing to save. From `gracefully` on it is handed to whoever
brings all workers to a common end (`pipeplan_launch.stopping`), until it is repeated.

torchrun ends the workers that are left over after a fault by the same SIGTERM. Under the launcher, which notes the
signals that it gets itself, a SIGTERM that it knows nothing of is taken for that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from pipeplan_launch import restarts

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
AGAIN_S = 1.0
"""A signal so long after the first is a second request. Sooner, it is the same one by another way: batch systems send
it to every process, and the launcher passes its own on."""
NOTED_S = 0.5
"""How long the launcher may take to note a signal that reached a worker at the same moment."""


class Interrupted(Exception):
    """The user, or the launcher, asked this process to stop."""


_requested: list[tuple[int, float]] = []
"""(signal, when it came), first and again."""
_handed_to: list[Callable[[], None]] = []
_last_words: list[Callable[[bool], None]] = []
_wakeup: list[int] = []
"""What Python writes the number of a signal to, as soon as it comes."""


def catch_signals() -> None:
    """Note SIGINT and SIGTERM from now on, in place of what they do by default. To be called in the main thread."""
    watch_signals(_came)


def watch_signals(act: Callable[[int], None]) -> None:
    """Have a thread call `act` with the number of every SIGINT and SIGTERM, at once.

    Python runs handlers in the main thread only, and not while that waits in a receive.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _wakeup[:] = [writer]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_on)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_default_again)
    threading.Thread(target=_watch, args=(reader, act), daemon=True, name="signals").start()


def gracefully(request: Callable[[], None]) -> None:
    """From now on hand a request to stop to `request`, which is called in another thread, and let work go on."""
    _handed_to[:] = [request]
    if _requested:
        request()


def last_words(say: Callable[[bool], None]) -> None:
    """Have `say` called before a signal ends this process, with whether that is for good. It may take `NOTED_S`."""
    _last_words[:] = [say]


def die_with_parent() -> bool:
    """Have Linux end this process when the launcher that started it is gone. Whether it will: others cannot."""
    try:
        return not ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError, TypeError):
        return False


def check_interrupt() -> None:
    """Raises `Interrupted` if a signal has come that is to end this worker at once."""
    if _requested and (not _handed_to or len(_requested) > 1):
        raise Interrupted(signal.Signals(_requested[0][0]).name)


def peers_were_asked() -> None:
    """Raises `Interrupted` if a signal has come: a peer that is gone was then asked to stop as well."""
    if _requested:
        raise Interrupted(signal.Signals(_requested[0][0]).name)


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Where something else, an event loop say, has taken what wakes the thread: wake it from here."""
    taken = signal.set_wakeup_fd(_wakeup[0], warn_on_full_buffer=False)
    if taken != _wakeup[0]:
        os.write(_wakeup[0], bytes([number]))
    if taken not in (-1, _wakeup[0]):
        signal.set_wakeup_fd(taken)


def _watch(reader: int, act: Callable[[int], None]) -> None:
    while True:
        for number in os.read(reader, 64):
            if number in (signal.SIGINT, signal.SIGTERM):
                act(number)


def _came(number: int) -> None:
    now = time.monotonic()
    if not _requested or (len(_requested) == 1 and now - _requested[0][1] > AGAIN_S):
        _requested.append((number, now))
        _act(number)


def _act(number: int) -> None:
    if not restarts.launched():
        if _handed_to:
            _hand_on()
        return  # else `check_interrupt` has the say
    if number == signal.SIGTERM and not _known_to_launcher():
        _end(restarts.LOST)
    if not _handed_to or len(_requested) > 1:
        restarts.give_up(restarts.INTERRUPTED)
        _end(restarts.INTERRUPTED)
    _hand_on()


def _hand_on() -> None:
    """Passing a request on may take long where other servers are out of reach; a second signal is then to be seen."""
    request = threading.Thread(target=_handed_to[0], daemon=True)
    request.start()
    request.join(NOTED_S)


def _end(status: int) -> None:
    for say in _last_words:  # in a thread, because what it needs may be gone or taken
        words = threading.Thread(target=say, args=(status in restarts.FINAL,), daemon=True)
        words.start()
        words.join(NOTED_S)
    os._exit(status)


def _known_to_launcher() -> bool:
    deadline = time.monotonic() + NOTED_S
    while restarts.stop_asked() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _default_again() -> None:
    """In a process that was forked from here, a data loader's say: it is to die of these signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _pass_on:
            signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
