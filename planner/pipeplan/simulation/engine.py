"""The replay itself: events in simulated time. Nothing is random and nothing depends on a clock.

worker   runs the actions of its stream in order, one at a time; F and B wait for their message
link     one message at a time, first come first served: busy for transmit_s (gradients: back_s), and it arrives
         latency_s later; with several links at a boundary, the minibatches of a copy take them in turn
R        joins the group's all-reduce, which starts when all replicas have, and the one before has ended
U        lasts exposed_s on the worker; what is left of the all-reduce, hidden_s, goes on behind it. Where U follows
         its R at once, the hidden part runs after the exposed one; where the schedule put other actions between
         them, before it, and U waits for it.
card     with `Scenario.cards`, what is on a link or hidden in an all-reduce is a flow, which shares the network cards
         that it passes (`flows`): it then takes as long as they let it. An all-reduce after a flush is one as a whole.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pipeplan.errors import InputError
from pipeplan.simulation.flows import Network, Use
from pipeplan.simulation.scenario import Hop, Load, Scenario
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


class _Load(NamedTuple):
    """What is to be carried over a link: first as a flow, then as what no card slows."""

    number: int
    flow_s: float
    rest_s: float
    use: Use
    begun: Callable[[float], None]
    """Called when the link takes it up, with the time that this is."""
    flown: Callable[[], None]
    """Called when the flow has arrived."""


@dataclass
class _Link:
    row: str
    free_s: float = 0.0
    waiting: deque[_Load] = field(default_factory=deque)
    busy: bool = False


class _Engine:
    def __init__(self, scenario: Scenario, minibatches: int) -> None:
        self._scenario = scenario
        self._last = len(scenario.stages) - 1
        self._now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0
        self._actions: list[Pass] = []
        self._transfers: list[Transfer] = []
        self._joined: dict[tuple[int, int], int] = {}
        self._waited: dict[tuple[int, int], float] = {}
        """(stage, group) -> since when its replicas, drained, have done nothing but wait for this all-reduce."""
        self._workers = [
            [
                _Worker(stage, replica, scenario.schedule.stream(scenario.shapes, stage, replica, minibatches))
                for replica in range(load.replicas)
            ]
            for stage, load in enumerate(scenario.stages)
        ]
        self._activations = [_links(f"stage {i + 1} → {i + 2}", hops) for i, hops in enumerate(scenario.hops)]
        self._gradients = [_links(f"stage {i + 2} → {i + 1}", hops) for i, hops in enumerate(scenario.hops)]
        self._network = None if scenario.cards is None else Network(lambda: self._now, self._at)
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
            self._now, _, _, happen = heapq.heappop(self._events)
            happen()
        stuck = next((worker for worker in everyone if worker.head is not None), None)
        if stuck is not None:
            raise InputError(self._deadlock(stuck))
        if not math.isfinite(self._now):
            raise InputError("the times of the plan are too long to add up")
        return Replayed(tuple(self._actions), tuple(self._transfers), self._now)

    def _at(self, time_s: float, happen: Callable[[], None], rank: int = -1) -> None:
        """Events at the same time happen by their rank, and then in the order in which they were planned."""
        self._count += 1
        heapq.heappush(self._events, (time_s, rank, self._count, happen))

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
                    began_s = self._waited.get((worker.stage, action.index))
                    self._compute(worker, action, self._parts(load)[1], began_s)

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

    def _compute(self, worker: _Worker, action: Action, duration_s: float, began_s: float | None = None) -> None:
        """Keep a worker busy from now on; `began_s` is when it was held up already by the same action."""
        worker.busy = True
        start_s = self._now if began_s is None else began_s
        cores = self._cores(worker)
        if cores and self._network is not None:

            def computed() -> None:
                self._actions.append(Pass(worker.stage, worker.replica, action, start_s, self._now))
                self._finish(worker, action)

            self._network.start(duration_s, cores, computed)
            return
        self._actions.append(Pass(worker.stage, worker.replica, action, start_s, self._now + duration_s))
        # Replicas that finish together send in the order of their minibatches.
        self._at(self._now + duration_s, lambda: self._finish(worker, action), action.index)

    def _cores(self, worker: _Worker) -> Use:
        """What a worker that computes takes of its server's cores, where they are shared."""
        cards = self._scenario.cards
        return {} if cards is None else cards.computing(self._scenario.stages[worker.stage].workers[worker.replica])

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
        replicas = self._workers[target]
        receiver = replicas[action.index % len(replicas)]
        use = self._use(action, boundary, copy)
        self._carry(
            links[copy][turn % hop.links],
            _Load(
                action.index,
                busy_s,
                0.0,
                use,
                begun=lambda _: None,
                flown=lambda: self._at(self._now + hop.latency_s, lambda: self._arrive(receiver, action)),
            ),
        )

    def _use(self, action: Action, boundary: int, copy: int) -> Use:
        """The cards that a message passes: with the activations from this stage to the next, with gradients back."""
        if self._scenario.cards is None:
            return {}
        ends = self._scenario.stages[boundary : boundary + 2]
        here, there = (load.workers[action.index % load.replicas] for load in ends)
        if action.kind is Kind.BACKWARD:
            here, there = there, here
        return self._scenario.cards.message(here, there, self._scenario.hops[boundary][copy].bandwidth)

    def _carry(self, link: _Link, load: _Load) -> None:
        """Queue something on a link. Called in order of time, so first come is first."""
        if self._network is None:
            start = max(self._now, link.free_s)
            link.free_s = start + load.flow_s + load.rest_s
            self._note(link, load.number, start, link.free_s)
            load.begun(start)
            self._at(start + load.flow_s, load.flown)
            return
        link.waiting.append(load)
        if not link.busy:
            self._take_up(link, self._network)

    def _take_up(self, link: _Link, network: Network) -> None:
        """Begin with the next that waits for a link, which is free."""
        load, start = link.waiting.popleft(), self._now
        link.busy = True
        load.begun(start)

        def flown() -> None:
            load.flown()
            self._at(self._now + load.rest_s, over)

        def over() -> None:
            self._note(link, load.number, start, self._now)
            link.busy = False
            if link.waiting:
                self._take_up(link, network)

        network.start(load.flow_s, load.use, flown)

    def _note(self, link: _Link, number: int, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self._transfers.append(Transfer(link.row, number, start_s, end_s))

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
        hidden, exposed = self._parts(self._scenario.stages[worker.stage])
        # Cards may slow what a flush waits for, so that its end, not its start, is when the replicas go on.
        waits = self._network is not None and self._scenario.drains
        early = [replica for replica in replicas if group in replica.awaits_at_once and not waits]
        late = [replica for replica in replicas if replica not in early]
        for replica in replicas:
            replica.awaits_at_once.discard(group)

        def begun(start: float) -> None:
            if waits:
                self._waited[key] = start
            for replica in early:
                self._release(replica, update, start)

        def flown() -> None:
            for replica in late:
                self._release(replica, update, self._now)

        use = self._scenario.cards.ring(worker.stage) if self._scenario.cards is not None else {}
        self._carry(self._sync[worker.stage], _Load(group, hidden, exposed, use, begun, flown))

    def _release(self, worker: _Worker, update: Action, time_s: float) -> None:
        self._at(time_s, lambda: self._arrive(worker, update))

    def _parts(self, load: Load) -> tuple[float, float]:
        """What of an all-reduce goes on behind the replicas' computing, and what holds them up."""
        overlap = self._scenario.overlap
        if self._network is not None and self._scenario.drains:
            return load.sync_s, 0.0
        return load.hidden_s(overlap), load.exposed_s(overlap)

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
