"""SIGINT and SIGTERM: noted when they come, acted upon between two actions, where nothing is half done."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupted(Exception):
    """The user, or the launcher, asked this process to stop."""


_requested: list[int] = []


def catch_signals() -> None:
    """Note SIGINT and SIGTERM from now on, in place of what they do by default."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _note)


def interrupted() -> bool:
    """Whether a signal has come."""
    return bool(_requested)


def check_interrupt() -> None:
    """Raises `Interrupted` if a signal has come."""
    if _requested:
        raise Interrupted(signal.Signals(_requested[0]).name)


def _note(number: int, _frame: FrameType | None) -> None:
    _requested.append(number)
