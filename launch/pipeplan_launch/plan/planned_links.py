"""The link rates that a plan was made for, read from `links` of its stage files. Torch-free."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan import json_fields

Rate = tuple[float, float]
"""(bytes/s in each direction, latency in seconds)."""


@dataclass(frozen=True)
class PlannedLevel:
    """One level of the cluster's network. Every tuple but `starts` has one entry per component of the level."""

    starts: tuple[int, ...]
    """First worker of each component, then the number of all workers."""
    sendrecv: tuple[float, ...]
    """Rate of a point-to-point message inside the component, in bytes/s."""
    allreduce: tuple[float, ...]
    """Rate of an all-reduce inside the component, in bytes/s."""
    latency_s: tuple[float, ...]

    def component(self, worker: int) -> int:
        """The component that holds a worker."""
        return bisect_right(self.starts, worker) - 1


@dataclass(frozen=True)
class PlannedLinks:
    """The levels of the planned cluster, innermost first."""

    levels: tuple[PlannedLevel, ...]

    def message(self, workers: Iterable[int]) -> Rate:
        """Planned rate of messages between some workers."""
        level, component = self._smallest_common(workers)
        return level.sendrecv[component], level.latency_s[component]

    def ring(self, workers: Iterable[int]) -> Rate:
        """Planned rate of an all-reduce among some workers."""
        level, component = self._smallest_common(workers)
        return level.allreduce[component], level.latency_s[component]

    def _smallest_common(self, workers: Iterable[int]) -> tuple[PlannedLevel, int]:
        """(level, component) of the smallest component that holds all these workers."""
        low, high = min(workers := list(workers)), max(workers)
        for level in self.levels:
            if level.component(low) == level.component(high):
                return level, level.component(low)
        raise AssertionError("the outermost level holds all workers")


def read_planned_links(content: dict[str, Any], workers: int, where: str) -> PlannedLinks | None:
    """Read `links` of a stage file of a plan with this many workers; None where the file has none.

    Raises `LaunchError` for levels that do not nest or do not join all workers.
    """
    if content.get("links") is None:
        return None
    levels: list[PlannedLevel] = []
    for entry in json_fields.listing(content, "links", where):
        if not isinstance(entry, dict):
            raise LaunchError(f"{where}: every entry of 'links' must be an object")
        levels.append(_level(entry, workers, where))
    if len(levels[-1].starts) != 2:
        raise LaunchError(f"{where}: the last entry of 'links' does not join all {workers} workers")
    return PlannedLinks(tuple(levels))


def _level(entry: dict[str, Any], workers: int, where: str) -> PlannedLevel:
    starts = _starts(entry.get("span"), workers, where)
    count = len(starts) - 1
    return PlannedLevel(
        starts,
        _per_component(entry, "sendrecv", count, where),
        _per_component(entry, "allreduce", count, where),
        _per_component(entry, "latency_s", count, where),
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


def _per_component(entry: dict[str, Any], name: str, count: int, where: str) -> tuple[float, ...]:
    """One number for each component, from a list or from a single number that holds for all; null means no bound."""
    raw: Sequence[Any] = entry[name] if isinstance(entry.get(name), list) else [entry.get(name)] * count
    values = [json_fields.amount({name: value}, name, where) for value in raw]
    if len(values) != count:
        raise LaunchError(f"{where}: {name!r} of 'links' has {len(values)} entries where there are {count} components")
    return tuple(math.inf if value is None else value for value in values)
