"""The rates that a plan was made for, from `links` of its stage files. Torch-free."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan_launch import fields
from pipeplan_launch.errors import LaunchError

Rate = tuple[float, float]
"""Bytes/s, each direction, and seconds."""


@dataclass(frozen=True)
class Level:
    """What joins workers, or servers. Of each component, in order."""

    starts: tuple[int, ...]
    """Its first worker; and the number of all workers at the end."""
    sendrecv: tuple[float, ...]
    """Of a message inside it, bytes/s."""
    allreduce: tuple[float, ...]
    """Of an all-reduce inside it, bytes/s."""
    latency_s: tuple[float, ...]
    cards_s: tuple[float, ...] = ()
    """Of the components that it joins, how long a minibatch keeps the card of each busy; () inside a server."""

    def component(self, worker: int) -> int:
        """Which one holds a worker."""
        return bisect_right(self.starts, worker) - 1


@dataclass(frozen=True)
class Levels:
    """Innermost first."""

    levels: tuple[Level, ...]

    def joining(self, workers: Iterable[int]) -> tuple[int, int]:
        """(level, component) of the smallest component that holds some workers."""
        low, high = min(workers := list(workers)), max(workers)
        for number, level in enumerate(self.levels):
            if level.component(low) == level.component(high):
                return number, level.component(low)
        raise AssertionError("the outermost level holds all")

    def message(self, workers: Iterable[int]) -> Rate:
        """Of messages between some workers."""
        number, at = self.joining(workers)
        return self.levels[number].sendrecv[at], self.levels[number].latency_s[at]

    def ring(self, workers: Iterable[int]) -> Rate:
        """Of an all-reduce among some workers."""
        number, at = self.joining(workers)
        return self.levels[number].allreduce[at], self.levels[number].latency_s[at]

    def above(self, workers: Iterable[int]) -> tuple[int, int] | None:
        """(level, component) of the innermost component between servers that holds some workers; None without one."""
        low = min(workers)
        between = (number for number, level in enumerate(self.levels) if level.cards_s)
        number = next(between, None)
        return None if number is None else (number, self.levels[number].component(low))

    def sharing_ends(self) -> Iterable[tuple[int, Level, tuple[int, ...]]]:
        """Levels that join servers: (number, level, first workers of what it joins, and the number of all)."""
        for number, level in enumerate(self.levels):
            if level.cards_s:
                below = self.levels[number - 1].starts if number else tuple(range(level.starts[-1] + 1))
                yield number, level, below


def levels_of(content: dict[str, Any], workers: int, where: str) -> Levels | None:
    """What a stage file says, of a plan with so many workers; None if it does not. Raises `LaunchError`."""
    if content.get("links") is None:
        return None
    found: list[Level] = []
    below = workers
    for entry in fields.listing(content, "links", where):
        if not isinstance(entry, dict):
            raise LaunchError(f"{where}: every entry of 'links' must be an object")
        found.append(_level(entry, workers, below, where))
        below = len(found[-1].starts) - 1
    if below != 1:
        raise LaunchError(f"{where}: the last entry of 'links' does not join all {workers} workers")
    return Levels(tuple(found))


def _level(entry: dict[str, Any], workers: int, below: int, where: str) -> Level:
    starts = _starts(entry.get("span"), workers, where)
    count = len(starts) - 1
    cards = entry.get("cards_s")
    return Level(
        starts,
        _each(entry, "sendrecv", count, where),
        _each(entry, "allreduce", count, where),
        _each(entry, "latency_s", count, where),
        () if cards is None else _each(entry, "cards_s", below, where),
    )


def _starts(span: Any, workers: int, where: str) -> tuple[int, ...]:
    spans = span if isinstance(span, list) else [span]
    if not spans or not all(type(one) is int and 0 < one <= workers for one in spans):
        raise LaunchError(f"{where}: 'span' of 'links' must be a number of workers, or a list of them, not {span!r}")
    if not isinstance(span, list):
        spans = spans * (workers // span)
    if sum(spans) != workers:
        raise LaunchError(f"{where}: 'span' of 'links' must add up to the {workers} workers of the plan")
    return tuple(itertools.accumulate(spans, initial=0))


def _each(entry: dict[str, Any], name: str, count: int, where: str) -> tuple[float, ...]:
    """One for each component; null is without bounds."""
    given: Sequence[Any] = entry[name] if isinstance(entry.get(name), list) else [entry.get(name)] * count
    values = [fields.amount({name: value}, name, where) for value in given]
    if len(values) != count:
        raise LaunchError(f"{where}: {name!r} of 'links' has {len(values)} entries where there are {count} components")
    return tuple(math.inf if value is None else value for value in values)
