"""The link rates that a plan was made for, and rounds in which links are measured. Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.typed_document import Amount, Positive

T = TypeVar("T")
Rate = tuple[float, float]
"""(bytes/s in each direction, latency in seconds)."""
RATES = ("sendrecv", "allreduce", "latency_s")


@dataclass(frozen=True)
class PlannedComponent:
    """Neighbouring workers that one level of the cluster's network connects, and the rates among them."""

    workers: range
    sendrecv: float
    """Rate of a point-to-point message, in bytes/s."""
    allreduce: float
    """Rate of an all-reduce, in bytes/s."""
    latency_s: float


@dataclass(frozen=True)
class PlannedLinks:
    """The components of the planned cluster, level by level, innermost first."""

    components: tuple[PlannedComponent, ...]

    def message(self, workers: Sequence[int]) -> Rate:
        """Planned rate of messages between some workers."""
        component = self._smallest_common(workers)
        return component.sendrecv, component.latency_s

    def ring(self, workers: Sequence[int]) -> Rate:
        """Planned rate of an all-reduce among some workers."""
        component = self._smallest_common(workers)
        return component.allreduce, component.latency_s

    def _smallest_common(self, workers: Sequence[int]) -> PlannedComponent:
        return next(one for one in self.components if min(workers) in one.workers and max(workers) in one.workers)


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
    levels = [list(_components(entry, workers, f"{where}: links[{index}]")) for index, entry in enumerate(fields)]
    if len(levels[-1]) != 1:
        raise LaunchError(f"{where}: the last entry of 'links' does not join all {workers} workers")
    return PlannedLinks(tuple(component for level in levels for component in level))


def _components(entry: LevelFields, workers: int, where: str) -> Iterator[PlannedComponent]:
    spans = entry.span if isinstance(entry.span, tuple) else (entry.span,) * (workers // entry.span)
    if sum(spans) != workers:
        raise LaunchError(f"{where}: span: the components do not add up to the {workers} workers of the plan")
    bounds = itertools.pairwise(itertools.accumulate(spans, initial=0))
    rates = (_per_component(getattr(entry, name), len(spans), f"{where}: {name}") for name in RATES)
    for (first, end), *own in zip(bounds, *rates, strict=True):
        yield PlannedComponent(range(first, end), *own)


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
