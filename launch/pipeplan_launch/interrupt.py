"""SIGINT and SIGTERM: noted when they come, acted upon between two actions, where nothing is half done."""

from __future__ import annotations

import ctypes
import signal
from types import FrameType

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class Interrupted(Exception):
    """The user, or the launcher, asked this process to stop."""


_requested: list[int] = []


def catch_signals() -> None:
    """Note SIGINT and SIGTERM from now on, in place of what they do by default."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _note)


def die_with_parent() -> bool:
    """Have Linux end this process when the launcher that started it is gone. Whether it will: others cannot."""
    try:
        return not ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError, TypeError):
        return False


def interrupted() -> bool:
    """Whether a signal has come."""
    return bool(_requested)


def check_interrupt() -> None:
    """Raises `Interrupted` if a signal has come."""
    if _requested:
        raise Interrupted(signal.Signals(_requested[0]).name)


def _note(number: int, _frame: FrameType | None) -> None:
    _requested.append(number)
