"""The cases of a long list that the default suite runs; the slow suite has all others, so that none is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def first_few(seeds: range, few: int) -> list[Any]:
    """Two parameters: a range of the first few seeds, and a slow one of all others."""
    return [pytest.param(seeds[:few], id="first"), pytest.param(seeds[few:], id="others", marks=pytest.mark.slow)]


def slow_but_for(quick: Iterable[Any] | Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Every value as a parameter, slow unless it is among `quick`, or unless `quick` says so."""
    chosen = quick if callable(quick) else list(quick).__contains__
    return [value if chosen(value) else pytest.param(value, marks=pytest.mark.slow) for value in values]
