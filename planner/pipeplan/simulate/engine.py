"""The replay itself: events in simulated time. Nothing is random and nothing depends on a clock.

worker   runs the actions of its stream in order, one at a time; F and B wait for their message
link     one message at a time, first come first served: busy for transmit_s (gradients: back_s), and it arrives
         latency_s later; with several links at a boundary, the minibatches of a copy take them in turn
R        joins the group's all-reduce, which starts when all replicas have, and the one before has ended
U        lasts exposed_s on the worker; what is left of the all-reduce, hidden_s, goes on behind it. Where U follows
         its R at once, the hidden part runs after the exposed one; where the schedule put other actions between
         them, before it, and U waits for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pipeplan.errors import InputError
from pipeplan.simulate.scenario import Hop, Scenario
from pipeplan_launch.schedule import Action, Kind


class Pass(NamedTuple):
    """A worker was busy with an action."""

    stage: int
    replica: int
    action: Action
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """A link was busy."""

    row: str
    """Which link, for people."""
    number: int
    """Of the minibatch, or of the group of an all-reduce."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Replayed:
    """All that happened. What is computed and what is sent, each in order of its start."""

    actions: tuple[Pass, ...]
    """Each worker's in the order of its stream, but for the starts of all-reduces, which take no time."""
    transfers: tuple[Transfer, ...]
    end_s: float

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """What there is to see: all actions but updates that took no time."""
        return tuple(done for done in self.actions if done.action.kind is not Kind.UPDATE or done.end_s > done.start_s)

    def finished(self, stage: int, kind: Kind) -> list[float]:
        """When a stage finished its passes of one kind, in order of time."""
        return sorted(done.end_s for done in self.passes if done.stage == stage and done.action.kind is kind)


@dataclass
class _Worker:
    stage: int
    replica: int
    stream: Iterator[Action]
    head: Action | None = None
    busy: bool = False
    arrived: set[Action] = field(default_factory=set)
    """Actions whose message is here, or whose all-reduce is far enough."""
    held: set[int] = field(default_factory=set)
    """Minibatches between the end of their forward and the start of their backward."""
    awaits_at_once: set[int] = field(default_factory=set)
    """Groups whose update directly follows the start of their all-reduce."""

    def pop(self) -> Action:
        """The next action; moves on to the one after it."""
        action, self.head = self.head, next(self.stream, None)
        assert action is not None
        return action


@dataclass
class _Link:
    row: str
    free_s: float = 0.0


class _Engine:
    def __init__(self, scenario: Scenario, minibatches: int) -> None:
        self._scenario = scenario
        self._last = len(scenario.stages) - 1
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._actions: list[Pass] = []
        self._transfers: list[Transfer] = []
        self._joined: dict[tuple[int, int], int] = {}
        self._workers = [
            [
                _Worker(stage, replica, scenario.schedule.stream(scenario.shapes, stage, replica, minibatches))
                for replica in range(load.replicas)
            ]
            for stage, load in enumerate(scenario.stages)
        ]
        self._activations = [_links(f"stage {i + 1} → {i + 2}", hops) for i, hops in enumerate(scenario.hops)]
        self._gradients = [_links(f"stage {i + 2} → {i + 1}", hops) for i, hops in enumerate(scenario.hops)]
        # Copies of a pipeline sit in different components, whose one link to each other all stages share.
        shared = _Link("all-reduce")
        self._sync = [
            shared if scenario.copies > 1 else _Link(f"all-reduce of stage {stage + 1}")
            for stage in range(self._last + 1)
        ]

    def run(self) -> Replayed:
        """Play all streams to their ends. Raises `InputError` on a deadlock, naming who waits for what."""
        everyone = [worker for stage in self._workers for worker in stage]
        for worker in everyone:
            worker.head = next(worker.stream, None)
        for worker in everyone:
            self._advance(worker)
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        stuck = next((worker for worker in everyone if worker.head is not None), None)
        if stuck is not None:
            raise InputError(self._deadlock(stuck))
        if not math.isfinite(self._now):
            raise InputError("the times of the plan are too long to add up")
        return Replayed(tuple(self._actions), tuple(self._transfers), self._now)

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        """Events at the same time happen in the order in which they were planned."""
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, happen))

    def _advance(self, worker: _Worker) -> None:
        """Start whatever this worker can start now."""
        load = self._scenario.stages[worker.stage]
        while not worker.busy and worker.head is not None and self._ready(worker, worker.head):
            action = worker.pop()
            worker.arrived.discard(action)
            match action.kind:
                case Kind.FORWARD:
                    self._compute(worker, action, load.forward_s)
                case Kind.BACKWARD:
                    worker.held.remove(action.index)
                    self._compute(worker, action, load.backward_s)
                case Kind.REDUCE:
                    self._join(worker, action.index)
                case Kind.UPDATE:
                    self._compute(worker, action, load.exposed_s(self._scenario.overlap))

    def _ready(self, worker: _Worker, action: Action) -> bool:
        match action.kind:
            case Kind.FORWARD:
                return worker.stage == 0 or action in worker.arrived
            case Kind.BACKWARD:
                here = worker.stage == self._last or action in worker.arrived
                return here and action.index in worker.held
            case Kind.REDUCE:
                return True
            case Kind.UPDATE:
                return action in worker.arrived

    def _compute(self, worker: _Worker, action: Action, duration_s: float) -> None:
        worker.busy = True
        self._actions.append(Pass(worker.stage, worker.replica, action, self._now, self._now + duration_s))
        self._at(self._now + duration_s, lambda: self._finish(worker, action))

    def _finish(self, worker: _Worker, action: Action) -> None:
        worker.busy = False
        match action.kind:
            case Kind.FORWARD:
                worker.held.add(action.index)
                if worker.stage < self._last:
                    self._send(self._activations[worker.stage], worker.stage, worker.stage + 1, action)
            case Kind.BACKWARD if worker.stage > 0:
                self._send(self._gradients[worker.stage - 1], worker.stage - 1, worker.stage - 1, action)
            case _:
                pass
        self._advance(worker)

    def _send(self, links: list[list[_Link]], boundary: int, target: int, action: Action) -> None:
        """Queue a message; the receiver has it once it has crossed."""
        turn, copy = divmod(action.index, self._scenario.copies)
        hop = self._scenario.hops[boundary][copy]
        busy_s = hop.transmit_s if action.kind is Kind.FORWARD else hop.back_s
        start = self._occupy(links[copy][turn % hop.links], action.index, busy_s)
        replicas = self._workers[target]
        receiver = replicas[action.index % len(replicas)]
        self._at(start + busy_s + hop.latency_s, lambda: self._arrive(receiver, action))

    def _occupy(self, link: _Link, index: int, duration_s: float) -> float:
        """Take a link as soon as it is free; returns when that is. Called in order of time, so first come is first."""
        start = max(self._now, link.free_s)
        link.free_s = start + duration_s
        if duration_s > 0:
            self._transfers.append(Transfer(link.row, index, start, link.free_s))
        return start

    def _arrive(self, worker: _Worker, action: Action) -> None:
        worker.arrived.add(action)
        self._advance(worker)

    def _join(self, worker: _Worker, group: int) -> None:
        """One replica starts the group's all-reduce; the last of them sets it off."""
        update = Action(Kind.UPDATE, group)
        if worker.head == update:
            worker.awaits_at_once.add(group)
        key = worker.stage, group
        self._joined[key] = self._joined.get(key, 0) + 1
        replicas = self._workers[worker.stage]
        if self._joined[key] < len(replicas):
            return
        del self._joined[key]
        load, overlap = self._scenario.stages[worker.stage], self._scenario.overlap
        hidden = load.hidden_s(overlap)
        start = self._occupy(self._sync[worker.stage], group, load.exposed_s(overlap) + hidden)
        for replica in replicas:
            at_once = group in replica.awaits_at_once
            replica.awaits_at_once.discard(group)
            self._release(replica, update, start if at_once else start + hidden)

    def _release(self, worker: _Worker, update: Action, time_s: float) -> None:
        self._at(time_s, lambda: self._arrive(worker, update))

    def _deadlock(self, worker: _Worker) -> str:
        load = self._scenario.stages[worker.stage]
        return (
            f"schedule {self._scenario.schedule.name} stands still after {self._now:g} s: worker "
            f"{load.workers[worker.replica]} (stage {worker.stage + 1}) waits for ever at {worker.head}; replicas and "
            f"depths are {[(stage.replicas, stage.depth) for stage in self._scenario.stages]}: solve again with --force"
        )


def _links(name: str, hops: Sequence[Hop]) -> list[list[_Link]]:
    """The links of a boundary in one direction, for every copy of the pipeline."""
    found = []
    for copy, hop in enumerate(hops, start=1):
        of_copy = name if len(hops) == 1 else f"{name}, copy {copy}"
        names = (of_copy if hop.links == 1 else f"{of_copy}, link {link + 1}" for link in range(hop.links))
        found.append([_Link(row) for row in names])
    return found


def replay(scenario: Scenario, minibatches: int) -> Replayed:
    """Replay a plan for so many minibatches; an `InputError` where its schedule cannot come to its end."""
    return _Engine(scenario, minibatches).run()
