"""The events of a simulation: the actions of workers and the transfers over links, each with its start and its end."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pipeplan_launch.plan.schedule import Action, ActionKind


class Pass(NamedTuple):
    """A period in which a worker was busy with an action."""

    stage: int
    replica: int
    action: Action
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """A period in which a link was busy."""

    row: str
    """The link, in words."""
    number: int
    """Number of the minibatch, or of the group of an all-reduce."""
    start_s: float
    end_s: float
    pair: str = ""
    """The two workers, in words, where each pair has a link of its own."""

    @property
    def whole_row(self) -> str:
        """The link and its workers, in words; the transfers of one row follow each other."""
        return f"{self.row}, {self.pair}" if self.pair else self.row


@dataclass(frozen=True)
class SimulatedEvents:
    """All events of a simulation: actions and transfers, each in order of their starts."""

    actions: tuple[Pass, ...]
    """The actions of all workers, for each worker in the order of its stream. Starts of all-reduces are not listed,
    because they take no time."""
    transfers: tuple[Transfer, ...]
    end_s: float
    """Time of the last event."""

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """All actions except updates that took no time."""
        return tuple(
            done
            for done in self.actions
            if done.action.kind not in (ActionKind.UPDATE, ActionKind.WEIGHTS) or done.end_s > done.start_s
        )

    def finished(self, stage: int, kind: ActionKind) -> list[float]:
        """The times at which a stage finished its passes of one kind, in increasing order."""
        return sorted(done.end_s for done in self.actions if done.stage == stage and done.action.kind is kind)


class EventQueue:
    """The simulated time, and what happens later.

    Events at the same time happen by rank, then in the order of their places.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._places = 0

    def at(self, time_s: float, rank: int, event: Callable[..., None], *args: Any) -> None:
        """Call `event(*args)` at a time, after the events of the same time and rank that are known already."""
        self._places += 1
        heapq.heappush(self.events, (time_s, rank, self._places, event, args))

    def next_place(self) -> int:
        """A place of its own, for an event whose time is not known yet."""
        self._places += 1
        return self._places

    def put(self, time_s: float, rank: int, place: int, event: Callable[..., None], *args: Any) -> None:
        """Call `event(*args)` at a time, at its place among the events of the same time and rank."""
        heapq.heappush(self.events, (time_s, rank, place, event, args))

    @property
    def next_s(self) -> float:
        """Time of the next event; infinite if there is none."""
        return self.events[0][0] if self.events else math.inf
