"""Calling the command line in a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ran(NamedTuple):
    """Exit code, and what was printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]
