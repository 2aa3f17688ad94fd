"""The simulator: a discrete-event simulation of a plan's schedule. It is deterministic and depends on no clock.

The rules:

worker   A worker runs the actions of its stream in order, one at a time. F and B wait for their message.
link     A link carries one message at a time, first come, first served. It is busy for transmit_s (for gradients
         back_s), and the message arrives latency_s later. With cards and without an order, every pair of workers has a
         link in each direction, and activations wait for their receive; otherwise a boundary has links that the
         minibatches of a copy take in turn.
R        R joins the all-reduce of the group, which starts once all replicas have joined and the previous one has ended.
U        U keeps the worker busy for exposed_s, and for the optimiser's step where B does not have it; the rest of the
         all-reduce, hidden_s, runs beside computing. Where U directly follows its R, the hidden part runs after the
         exposed one. Where the schedule put other actions between them, it runs before, and U waits for its end.
order    With a `Scenario.transport` that keeps one order, a message starts when `message_order` lets it.
card     With `Scenario.cards`, a message or the hidden part of an all-reduce is a flow that shares the network cards
         that it crosses (`fair_share`), and takes as long as these allow. Under a flush the whole all-reduce is such a
         flow, or what the last backward pass leaves of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop

from pipeplan.errors import InputError
from pipeplan.simulation.events import EventQueue, Pass, SimulatedEvents
from pipeplan.simulation.fair_share import RING_WEIGHT, FlowKind, SharedNetwork, Use, flow_kind
from pipeplan.simulation.message_order import message_order
from pipeplan.simulation.scenario import Scenario, StageBoundary, StageLoad
from pipeplan.simulation.serial_links import Carrier, Route, SerialLink, boundary_links
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan_launch.plan.one_order import Direction
from pipeplan_launch.plan.schedule import POSTED_RECEIVES, Action, ActionKind, device_actions, own_minibatches

EVENTS_BETWEEN_LOOKS = 256
"""Events between two checks of the deadline and the limit."""


class TooSlow(Exception):
    """A simulated schedule takes longer than the limit that the simulation was given."""


FORWARD, BACKWARD, WEIGHTS, REDUCE, UPDATE = ActionKind


@dataclass(eq=False, slots=True)
class _Worker:
    """The state of one stage on one replica."""

    stage: int
    replica: int
    load: StageLoad
    cores: int | None = field(init=False)
    """The kind of flow that its computing is, where it shares the cores of its server."""
    seat: _Seat = field(init=False)
    routes: dict[_Worker, Route] = field(default_factory=dict)
    """The routes to the workers of the next stage and the previous one."""
    activations: set[int] = field(default_factory=set)
    """Minibatches whose activations have arrived."""
    gradients: set[int] = field(default_factory=set)
    """Minibatches whose gradients have arrived."""
    reduced: set[int] = field(default_factory=set)
    """Groups whose all-reduce lets their update start."""
    awaiting_backward: set[int] = field(default_factory=set)
    """Minibatches between the end of their forward and the start of their backward pass."""
    joined: set[int] = field(default_factory=set)
    """Minibatches whose gradients of the weights were computed with those of the inputs."""
    awaits_at_once: set[int] = field(default_factory=set)
    """Groups whose update directly follows the start of their all-reduce."""
    taken: int = 0
    """Minibatches whose activations it has taken from their receives."""
    held: dict[int, tuple[Route, Action]] = field(default_factory=dict)
    """Messages whose receive is not posted yet, by their minibatch."""

    @property
    def number(self) -> int:
        """The worker's number in the cluster."""
        return self.load.workers[self.replica]


@dataclass(eq=False, slots=True)
class _Seat:
    """A worker: the actions that it runs in order, each with the stage, of which it may have several."""

    stream: Iterator[tuple[_Worker, Action]]
    head: tuple[_Worker, Action] | None = None
    busy: bool = False
    left_s: float = 0.0
    """Time that its passes which have not begun take, without W."""


_Pairs = dict[tuple[int, int, bool], SerialLink]
"""The link of each two workers, by (sender, receiver, whether it carries activations)."""


class _Engine:
    def __init__(self, scenario: Scenario, minibatches: int) -> None:
        self._scenario = scenario
        self._queue = EventQueue()
        self._actions: list[Pass] = []
        self._order = message_order(scenario, minibatches)
        self._workers = [
            [_Worker(stage, replica, load) for replica in range(load.replicas)]
            for stage, load in enumerate(scenario.stages)
        ]
        self._seats = self._make_seats(minibatches)
        self._kinds: list[FlowKind] = []
        """The kinds of all flows that share cards or cores; empty if none do."""
        self._has_pairs = scenario.cards is not None and self._order is None
        """Whether each two workers have a link of their own in each direction."""
        self._make_routes()
        self._reduces = self._all_reduces()
        self._set_cores()
        self._network = None if scenario.cards is None else SharedNetwork(self._queue, self._kinds)
        self._carrier = Carrier(self._queue, self._network)
        self._joined: dict[tuple[int, int], int] = {}
        """(stage, group) -> the replicas that have joined its all-reduce."""
        self._waited: dict[tuple[int, int], float] = {}
        """(stage, group) -> time since which the drained replicas have only waited for this all-reduce."""

    def _kind(self, use: Use, weight: float = 1.0, *, is_message: bool = False) -> int:
        """The number of a new kind of flow."""
        self._kinds.append(flow_kind(use, weight, is_message=is_message))
        return len(self._kinds) - 1

    def _set_cores(self) -> None:
        """Set the kind of flow that computing is, on all workers that share the cores of their server."""
        cards = self._scenario.cards
        for worker in (worker for stage in self._workers for worker in stage):
            use = cards.computing(worker.number) if cards is not None else {}
            worker.cores = self._kind(use) if use else None

    def _make_seats(self, minibatches: int) -> list[_Seat]:
        """The seats of all workers, each with its stream of actions."""
        seats: dict[tuple[int | None, int, int], _Seat] = {}
        for worker in (worker for stage in self._workers for worker in stage):
            device = self._scenario.shapes[worker.stage].device
            place = device, -1 if device is not None else worker.stage, worker.replica
            if place not in seats:
                seats[place] = _Seat(self._stream(worker, device, minibatches))
            worker.seat = seats[place]
            load, passes = worker.load, len(own_minibatches(worker.replica, worker.load.replicas, minibatches))
            worker.seat.left_s += passes * (load.forward_s + load.backward_s - load.weights_s)
        return list(seats.values())

    def _stream(self, worker: _Worker, device: int | None, minibatches: int) -> Iterator[tuple[_Worker, Action]]:
        """The actions of a worker in order, of all its stages if it has a `device`."""
        schedule, shapes, replica = self._scenario.schedule, self._scenario.shapes, worker.replica
        if device is None:
            for action in schedule.stream(shapes, worker.stage, replica, minibatches):
                yield worker, action
        else:
            for stage, action in device_actions(schedule, shapes, device, replica, minibatches):
                yield self._workers[stage][replica], action

    def _make_routes(self) -> None:
        """Set the routes of all messages."""
        scenario, pairs = self._scenario, _Pairs()
        boundaries = range(len(scenario.hops))
        for forward in (True, False) if scenario.schedule.trains else (True,):
            for boundary in boundaries if forward else reversed(boundaries):
                before, behind = self._workers[boundary : boundary + 2]
                name = f"stage {boundary + 1} → {boundary + 2}" if forward else f"stage {boundary + 2} → {boundary + 1}"
                links = boundary_links(name, scenario.hops[boundary])
                for index in range(math.lcm(len(before), len(behind))):
                    ends = before[index % len(before)], behind[index % len(behind)]
                    sender, receiver = ends if forward else (ends[1], ends[0])
                    turn, copy = divmod(index, scenario.copies)
                    hop = scenario.hops[boundary][copy]
                    link = links[copy][turn % hop.links]
                    sender.routes[receiver] = self._route(sender, receiver, hop, link, pairs)

    def _route(self, sender: _Worker, receiver: _Worker, hop: StageBoundary, link: SerialLink, pairs: _Pairs) -> Route:
        """The route of all messages from one worker to another."""
        forward = receiver.stage > sender.stage
        ends, kind = (sender.number, receiver.number), 0
        if self._has_pairs:
            link = pairs.setdefault((*ends, forward), SerialLink(link.row, f"worker {ends[0]} → {ends[1]}"))
        if self._scenario.cards is not None:
            kind = self._kind(self._scenario.cards.message(*ends, hop.bandwidth), is_message=self._has_pairs)
        flown = partial(self._message_flown, sender, receiver, hop.latency_s)
        return Route(link, hop.transmit_s if forward else hop.back_s, 0.0, kind, None, flown)

    def _all_reduces(self) -> list[Route]:
        """The route of the all-reduces of every stage."""
        scenario, cards = self._scenario, self._scenario.cards
        # Copies of a pipeline are in different components, and all stages share the link between these.
        shared = SerialLink("all-reduce")
        routes = []
        for stage, load in enumerate(scenario.stages):
            link = shared if scenario.copies > 1 else SerialLink(f"all-reduce of stage {stage + 1}")
            kind = 0 if cards is None else self._kind(cards.ring(stage), RING_WEIGHT)
            routes.append(Route(link, *self._parts(load), kind, self._reduce_begun, self._reduce_flown))
        return routes

    def _parts(self, load: StageLoad) -> tuple[float, float]:
        """The hidden and the exposed part of an all-reduce, in seconds."""
        overlap = self._scenario.overlap
        if self._scenario.drains:
            left_s = load.sync_s if load.left_s is None else load.left_s
            return (left_s, 0.0) if self._scenario.cards is not None else (0.0, left_s)
        return load.hidden_s(overlap), load.exposed_s(overlap)

    def run(self, deadline: Deadline, limit_s: float) -> SimulatedEvents:
        """Play all streams to their ends.

        Raises an `InputError` on a deadlock, with a worker and what it waits for, `OutOfTime` at the deadline, and
        `TooSlow` as soon as the first stage certainly ends after `limit_s`.
        """
        queue, network, count = self._queue, self._network, 0
        for seat in self._seats:
            seat.head = next(seat.stream, None)
        for seat in self._seats:
            self._advance(seat)
        while queue.events or (network is not None and network.is_changed):
            if network is not None and network.is_changed and queue.next_s > queue.now:
                network.plan()
                continue
            queue.now, _, _, event, args = heappop(queue.events)
            event(*args)
            count += 1
            if count % EVENTS_BETWEEN_LOOKS == 0:
                deadline.check()
                self._check_limit(limit_s)
        stuck = next((seat.head for seat in self._seats if seat.head is not None), None)
        if stuck is not None:
            raise InputError(self._deadlock(*stuck))
        if not math.isfinite(queue.now):
            raise InputError("the times of the plan are too long to add up")
        transfers = sorted(self._carrier.transfers, key=lambda done: done.start_s)
        return SimulatedEvents(tuple(self._actions), tuple(transfers), queue.now)

    def _check_limit(self, limit_s: float) -> None:
        """Raise `TooSlow` if the passes that are left take longer. The first stage ends after those of all stages."""
        if self._seats[0].head is not None and self._queue.now + max(seat.left_s for seat in self._seats) > limit_s:
            raise TooSlow

    def _advance(self, seat: _Seat) -> None:
        """Start all actions that a worker can start now."""
        while not seat.busy and seat.head is not None:
            worker, action = seat.head
            kind, index, load = action.kind, action.index, worker.load
            if self._order is not None and not self._order.may_compute((worker.stage, worker.replica), action):
                return
            if kind is FORWARD:
                if worker.stage > 0 and index not in worker.activations:
                    return
                seat.head = next(seat.stream, None)
                worker.activations.discard(index)
                worker.seat.left_s -= load.forward_s
                self._post_receive(worker, index)
                self._compute(worker, action, load.forward_s)
            elif kind is BACKWARD:
                is_last = worker.stage == len(self._workers) - 1
                if index not in worker.awaiting_backward or not (is_last or index in worker.gradients):
                    return
                seat.head = next(seat.stream, None)
                worker.gradients.discard(index)
                worker.awaiting_backward.remove(index)
                worker.seat.left_s -= load.backward_s - load.weights_s
                joined = load.weights_s > 0 and self._joins_weights(worker, index)
                self._compute(worker, action, load.backward_s - (0.0 if joined else load.weights_s))
            elif kind is WEIGHTS:
                seat.head = next(seat.stream, None)
                joined = index in worker.joined
                worker.joined.discard(index)
                self._compute(worker, action, 0.0 if joined else load.weights_s)
            elif kind is REDUCE:
                seat.head = next(seat.stream, None)
                self._join(worker, index)
            else:
                if index not in worker.reduced:
                    return
                seat.head = next(seat.stream, None)
                worker.reduced.discard(index)
                busy_s = self._reduces[worker.stage].rest_s + load.step_s
                self._compute(worker, action, busy_s, self._waited.get((worker.stage, index)))

    def _joins_weights(self, worker: _Worker, index: int) -> bool:
        """Whether W directly follows B on a worker with several stages, and no other worker waits for B's gradient."""
        follows = worker.seat.head == (worker, Action(WEIGHTS, index))
        shapes, stage = self._scenario.shapes, worker.stage
        at_home = stage == 0 or shapes[stage - 1].device == shapes[stage].device
        if follows and at_home and self._scenario.schedule.virtual is not None:
            worker.joined.add(index)
        return index in worker.joined

    def _compute(self, worker: _Worker, action: Action, duration_s: float, began_s: float | None = None) -> None:
        """Keep a worker busy for `duration_s`; `began_s` is the time since which it has waited for the same action."""
        worker.seat.busy = True
        now = self._queue.now
        start_s = now if began_s is None else began_s
        if worker.cores is not None and self._network is not None:
            self._network.start(duration_s, worker.cores, self._computed, worker, action, start_s)
            return
        self._actions.append(Pass(worker.stage, worker.replica, action, start_s, now + duration_s))
        # Replicas that finish at the same time send in the order of their minibatches.
        self._queue.at(now + duration_s, action.index, self._finish, worker, action)

    def _computed(self, worker: _Worker, action: Action, start_s: float) -> None:
        """Finish an action that shared the cores of its server."""
        self._actions.append(Pass(worker.stage, worker.replica, action, start_s, self._queue.now))
        self._finish(worker, action)

    def _finish(self, worker: _Worker, action: Action) -> None:
        worker.seat.busy = False
        if action.kind is FORWARD:
            worker.awaiting_backward.add(action.index)
            if worker.stage < len(self._workers) - 1:
                self._send(worker, self._workers[worker.stage + 1], action)
        elif action.kind is BACKWARD and worker.stage > 0:
            self._send(worker, self._workers[worker.stage - 1], action)
        if self._order is not None:
            self._order.computed(worker.stage, action)
        self._advance(worker.seat)

    def _send(self, sender: _Worker, receivers: list[_Worker], action: Action) -> None:
        """Queue a message on its link; it arrives at the receiver after the transfer and the latency."""
        receiver = receivers[action.index % len(receivers)]
        route = sender.routes[receiver]
        if self._order is not None:
            carry = partial(self._carrier.carry, route, action.index, action)
            self._order.made(_direction(action), sender.stage, action.index, carry)
        elif self._has_pairs and self._is_held(receiver, action, len(receivers)):
            receiver.held[action.index] = route, action
        else:
            self._carrier.carry(route, action.index, action)

    def _message_flown(self, sender: _Worker, receiver: _Worker, latency_s: float, action: Action) -> None:
        arrived = receiver.activations if action.kind is FORWARD else receiver.gradients
        if latency_s > 0:
            self._queue.at(self._queue.now + latency_s, -1, self._arrive, receiver, arrived, action.index)
        else:
            self._arrive(receiver, arrived, action.index)
        if self._order is not None:
            self._order.arrived(_direction(action), sender.stage, action.index)
            self._advance(sender.seat)

    def _arrive(self, worker: _Worker, arrived: set[int], index: int) -> None:
        """Note that activations or gradients of a minibatch are there, or that an update may start."""
        arrived.add(index)
        self._advance(worker.seat)

    def _is_held(self, receiver: _Worker, action: Action, replicas: int) -> bool:
        """Whether a message waits until its receive is posted.

        The executor posts the receives of a few minibatches ahead. Those of gradients are posted before the activations
        leave, so gradients never wait.
        """
        return action.kind is FORWARD and action.index // replicas >= receiver.taken + POSTED_RECEIVES

    def _post_receive(self, worker: _Worker, minibatch: int) -> None:
        """Note that a worker has taken the activations of a minibatch, and posts the next receive."""
        replicas = len(self._workers[worker.stage])
        worker.taken = minibatch // replicas + 1
        if (held := worker.held.pop(minibatch + POSTED_RECEIVES * replicas, None)) is not None:
            route, action = held
            self._carrier.carry(route, action.index, action)

    def _join(self, worker: _Worker, group: int) -> None:
        """Let one replica join the all-reduce of its group, which starts when the last replica joins."""
        if worker.seat.head == (worker, Action(UPDATE, group)):
            worker.awaits_at_once.add(group)
        key = worker.stage, group
        joined = self._joined.pop(key, 0) + 1
        if joined < len(self._workers[worker.stage]):
            self._joined[key] = joined
        else:
            self._carrier.carry(self._reduces[worker.stage], group, key)

    def _waits(self) -> bool:
        """Whether replicas go on at the end of an all-reduce, which cards may delay, and not at its start: under a
        flush."""
        return self._network is not None and self._scenario.drains

    def _reduce_begun(self, start_s: float, key: tuple[int, int]) -> None:
        stage, group = key
        if self._waits():
            self._waited[key] = start_s
            return
        for replica in self._workers[stage]:
            if group in replica.awaits_at_once:
                self._queue.at(start_s, -1, self._arrive, replica, replica.reduced, group)

    def _reduce_flown(self, key: tuple[int, int]) -> None:
        stage, group = key
        for replica in self._workers[stage]:
            if self._waits() or group not in replica.awaits_at_once:
                self._queue.at(self._queue.now, -1, self._arrive, replica, replica.reduced, group)
            replica.awaits_at_once.discard(group)

    def _deadlock(self, worker: _Worker, action: Action) -> str:
        load = worker.load
        return (
            f"schedule {self._scenario.schedule.name} comes to a deadlock after {self._queue.now:g} s: worker "
            f"{load.workers[worker.replica]} (stage {worker.stage + 1}) waits forever at {action}; replicas and "
            f"depths are {[(stage.replicas, stage.depth) for stage in self._scenario.stages]}: solve again with --force"
        )


def _direction(action: Action) -> Direction:
    return Direction.ACTIVATIONS if action.kind is FORWARD else Direction.GRADIENTS


def simulate_schedule(
    scenario: Scenario, minibatches: int, deadline: Deadline = NO_DEADLINE, limit_s: float = math.inf
) -> SimulatedEvents:
    """Simulate a plan for a number of minibatches.

    Raises an `InputError` where its schedule comes to a deadlock, `OutOfTime` where it does not end in time, and
    `TooSlow` where its first stage certainly ends after `limit_s`.
    """
    return _Engine(scenario, minibatches).run(deadline, limit_s)
