"""SIGINT, SIGTERM and SIGHUP in a worker: noted when they arrive, and handled when no operation is half done.

Before training, a signal ends the worker, as there is nothing to save. After `handle_requests_with`, a signal is passed
to a handler that stops all workers together (`pipeplan_launch.elastic.graceful_stop`); a second signal ends the worker.

After a fault, torchrun ends the remaining workers by a SIGTERM as well. The launcher notes every signal that it
receives. So if the launcher has not noted a SIGTERM, a worker knows that torchrun sent it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from pipeplan_launch.elastic import restart_state

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask for a stop. SIGHUP comes when a terminal closes or a connection to it breaks."""
REPEAT_S = 1.0
"""Time after which another signal counts as a second request. A signal that arrives sooner repeats the first one:
batch systems signal every process, and the launcher passes its signal on."""
NOTED_S = 0.5
"""Time within which the launcher notes a signal that reached a worker at the same moment."""


LAUNCHER_VARIABLE = "PIPEPLAN_LAUNCHER"
"""The launcher's process id, for its workers."""


class Interrupted(Exception):
    """The user or the launcher has asked this process to stop."""


_requested: list[tuple[int, float]] = []
"""(signal, time of arrival) of the first and the second request."""
_stop_handlers: list[Callable[[], None]] = []
_exit_callbacks: list[Callable[[bool], None]] = []
_wakeup: list[int] = []
"""The file descriptor to which Python writes the number of each signal."""


def catch_signals() -> None:
    """Note these signals from now on, instead of their default actions. Call this in the main thread."""
    watch_signals(_on_signal)


def watch_signals(act: Callable[[int], None]) -> None:
    """Start a thread that calls `act` with the number of every SIGINT, SIGTERM and SIGHUP at once.

    A SIGHUP that this process was started to ignore (nohup) stays ignored.

    Python runs signal handlers only in the main thread, and not while that thread waits for a message.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _wakeup[:] = [writer]
    for number in STOPPING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _wake_signal_thread)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_restore_defaults)
    threading.Thread(target=_watch, args=(reader, act), daemon=True, name="signals").start()


def handle_requests_with(request: Callable[[], None]) -> None:
    """Handle a signal by calling `request`, in another thread, instead of ending the worker."""
    _stop_handlers[:] = [request]
    if _requested:
        request()


def call_before_exit(callback: Callable[[bool], None]) -> None:
    """Call `callback(whether the launch is over)` before a signal ends this process. The callback may take `NOTED_S`
    seconds.
    """
    _exit_callbacks[:] = [callback]


def die_with_parent(parent: int | None = None) -> bool:
    """Let Linux kill this process when its parent ends. Returns False on other systems, which cannot do that.

    `parent`: process id of the parent. If the parent has already ended, which Linux does not report, this process ends
    at once.
    """
    try:
        armed = not ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError, TypeError):
        return False
    if armed and parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    return armed


def launcher_pid() -> int | None:
    """The process id of the launcher that has started this worker; None without a launcher."""
    text = os.environ.get(LAUNCHER_VARIABLE, "")
    return int(text) if text.isdecimal() else None


def check_interrupt() -> None:
    """Raise `Interrupted` if a signal has arrived that ends this worker at once."""
    if _requested and (not _stop_handlers or len(_requested) > 1):
        raise Interrupted(signal.Signals(_requested[0][0]).name)


def check_any_signal() -> None:
    """Raise `Interrupted` if a signal has arrived. A lost peer was then asked to stop too."""
    if _requested:
        raise Interrupted(signal.Signals(_requested[0][0]).name)


def _wake_signal_thread(number: int, _frame: FrameType | None) -> None:
    """Wake the signal thread, in case other code, such as an event loop, has replaced the wakeup file descriptor."""
    current = signal.set_wakeup_fd(_wakeup[0], warn_on_full_buffer=False)
    if current != _wakeup[0]:
        os.write(_wakeup[0], bytes([number]))
    if current not in (-1, _wakeup[0]):
        signal.set_wakeup_fd(current)


def _watch(reader: int, act: Callable[[int], None]) -> None:
    while True:
        for number in os.read(reader, 64):
            if number in STOPPING:
                act(number)


def _on_signal(number: int) -> None:
    now = time.monotonic()
    if not _requested or (len(_requested) == 1 and now - _requested[0][1] > REPEAT_S):
        _requested.append((number, now))
        _handle(number)


def _handle(number: int) -> None:
    if not restart_state.has_launcher():
        if _stop_handlers:
            _call_stop_handler()
        return  # without a handler, `check_interrupt` ends the worker
    if number == signal.SIGTERM and not _known_to_launcher():
        _exit(restart_state.STATUS_PEER_LOST)
    if not _stop_handlers or len(_requested) > 1:
        restart_state.record_final_status(restart_state.STATUS_INTERRUPTED)
        _exit(restart_state.STATUS_INTERRUPTED)
    _call_stop_handler()


def _call_stop_handler() -> None:
    """Pass the request on, and wait for `NOTED_S`. It runs in a thread, because it blocks if servers are
    unreachable.
    """
    request = threading.Thread(target=_stop_handlers[0], daemon=True)
    request.start()
    request.join(NOTED_S)


def _exit(status: int) -> None:
    for callback in _exit_callbacks:  # called in a thread, because it may block on a lock or a lost store
        thread = threading.Thread(target=callback, args=(status in restart_state.FINAL_STATUSES,), daemon=True)
        thread.start()
        thread.join(NOTED_S)
    os._exit(status)


def _known_to_launcher() -> bool:
    deadline = time.monotonic() + NOTED_S
    while restart_state.stop_signal() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _restore_defaults() -> None:
    """Restore the default actions in a forked process, such as a data loader, so that these signals end it."""
    for number in STOPPING:
        if signal.getsignal(number) is _wake_signal_thread:
            signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
