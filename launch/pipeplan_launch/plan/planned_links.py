"""The link rates that a plan was made for, and rounds in which links are measured. Torch-free."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.typed_document import Amount, Positive

T = TypeVar("T")
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


class LevelFields(Struct):
    """An entry of `links` in a stage file. If the components of the level differ, a field is a list with one entry for
    each component.
    """

    span: Positive | tuple[Positive, ...]
    """Workers of a component."""
    sendrecv: Amount | tuple[Amount | None, ...] | None = None
    allreduce: Amount | tuple[Amount | None, ...] | None = None
    latency_s: Amount | tuple[Amount | None, ...] | None = None


def planned_links(fields: Sequence[LevelFields], workers: int, where: str) -> PlannedLinks:
    """The link rates of a plan with this many workers.

    Raises `LaunchError` for levels that do not nest or do not join all workers.
    """
    levels = tuple(_level(entry, workers, f"{where}: links[{index}]") for index, entry in enumerate(fields))
    if len(levels[-1].starts) != 2:
        raise LaunchError(f"{where}: the last entry of 'links' does not join all {workers} workers")
    return PlannedLinks(levels)


def _level(entry: LevelFields, workers: int, where: str) -> PlannedLevel:
    span = entry.span
    spans = span if isinstance(span, tuple) else (span,) * (workers // span)
    if sum(spans) != workers:
        raise LaunchError(f"{where}: span: the components do not add up to the {workers} workers of the plan")
    return PlannedLevel(
        tuple(itertools.accumulate(spans, initial=0)),
        _per_component(entry.sendrecv, len(spans), f"{where}: sendrecv"),
        _per_component(entry.allreduce, len(spans), f"{where}: allreduce"),
        _per_component(entry.latency_s, len(spans), f"{where}: latency_s"),
    )


def _per_component(given: float | tuple[float | None, ...] | None, count: int, where: str) -> tuple[float, ...]:
    """One number for each component, from a list or from a single number that holds for all; null means no bound."""
    values = given if isinstance(given, tuple) else (given,) * count
    if len(values) != count:
        raise LaunchError(f"{where}: {len(values)} entries where there are {count} components")
    return tuple(math.inf if value is None else value for value in values)


def pack_rounds(teams: Iterable[T], needs: Callable[[T], set[Hashable]], alone: bool = False) -> list[list[T]]:
    """Pack teams into rounds such that no two teams of a round need the same resource (first fit).

    `needs`: the resources of a team. `alone`: put every team into a round of its own.
    """
    rounds: list[tuple[set[Hashable], list[T]]] = []
    for team in teams:
        wanted = needs(team)
        for taken, members in rounds if not alone else ():
            if not taken & wanted:
                taken |= wanted
                members.append(team)
                break
        else:
            rounds.append((set(wanted), [team]))
    return [members for _, members in rounds]
