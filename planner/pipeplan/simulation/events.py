"""The events of a simulation: the actions of workers and the transfers over links, each with its start and its end."""

from __future__ import annotations

import heapq
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
    """Name of the link in words."""
    number: int
    """Index of the minibatch, or of the group of an all-reduce."""
    start_s: float
    end_s: float
    pair: str = ""
    """The two workers in words, if each pair has its own link; else empty."""

    @property
    def whole_row(self) -> str:
        """Name of the link with its workers. The transfers of one row do not overlap."""
        return f"{self.row}, {self.pair}" if self.pair else self.row


@dataclass(frozen=True)
class SimulatedEvents:
    """All events of a simulation: actions and transfers, each in order of their starts."""

    actions: tuple[Pass, ...]
    """The actions of all workers. The actions of one worker are in the order of its stream. Starts of all-reduces are
    left out, because they take no time."""
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


FIRST = -1
"""The rank of all events except ends of passes. The rank of the end of a pass is the index of its minibatch."""


class EventQueue:
    """The simulated time, and the scheduled events.

    Events at the same time happen by rank, then in the order in which they were scheduled.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.settle: Callable[[], None] | None = None
        """A function that is called once before the time advances."""
        self._events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time_s: float, rank: int, event: Callable[..., None], *args: Any) -> None:
        """Schedule the call `event(*args)` at a time."""
        self._count += 1
        heapq.heappush(self._events, (time_s, rank, self._count, event, args))

    def pop(self) -> bool:
        """Advance the time to the next event and execute it. Returns False if there is none."""
        if self.settle is not None and (not self._events or self._events[0][0] > self.now):
            settle, self.settle = self.settle, None
            settle()
        if not self._events:
            return False
        self.now, _, _, event, args = heapq.heappop(self._events)
        event(*args)
        return True
