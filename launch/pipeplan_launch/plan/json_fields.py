"""Typed access to the fields of a JSON object. A missing or mistyped field is a one-line `LaunchError`.

All functions take `where`, the name of the file for errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeplan_launch.errors import LaunchError


def integer(content: Mapping[str, Any], key: str, where: str, least: int, most: int = 2**63 - 1) -> int:
    """A whole number from `least` to `most`."""
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LaunchError(f"{where}: {key!r} must be a whole number of at least {least}, not {_short(value)}")
    if value > most:
        raise LaunchError(f"{where}: {key!r} must be at most {most}, not {_short(value)}")
    return value


def text(content: Mapping[str, Any], key: str, where: str) -> str:
    """A non-empty string."""
    value = content.get(key)
    if not isinstance(value, str) or not value:
        raise LaunchError(f"{where}: {key!r} must be a string, not {value!r}")
    return value


def choice(content: Mapping[str, Any], key: str, where: str, known: Sequence[str]) -> str:
    """One of a few known strings."""
    value = content.get(key)
    if value not in known:
        raise LaunchError(f"{where}: {key!r} must be one of {', '.join(known)}, not {value!r}")
    return str(value)


def mapping(content: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """A JSON object."""
    value = content.get(key)
    if not isinstance(value, dict):
        raise LaunchError(f"{where}: {key!r} must be an object, not {value!r}")
    return value


def listing(content: Mapping[str, Any], key: str, where: str) -> list[Any]:
    """A non-empty list."""
    value = content.get(key)
    if not isinstance(value, list) or not value:
        raise LaunchError(f"{where}: {key!r} must be a list with at least one entry, not {value!r}")
    return value


def names(content: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A non-empty list of strings."""
    value = listing(content, key, where)
    if not all(isinstance(name, str) for name in value):
        raise LaunchError(f"{where}: {key!r} must be a list of names")
    return tuple(value)


def amount(content: Mapping[str, Any], key: str, where: str) -> float | None:
    """A finite number of at least 0, or None for null or a missing field."""
    value = content.get(key)
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise LaunchError(f"{where}: {key!r} must be a number of at least 0, not {_short(value)}")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
