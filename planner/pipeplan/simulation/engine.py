"""The simulator: a discrete-event simulation of a plan's schedule. It is deterministic and depends on no clock.

The rules:

worker   A worker runs the actions of its stream in order, one at a time. F and B wait for their message.
link     A link carries one message at a time, first come, first served. It is busy for transmit_s (for gradients
         back_s), and the message arrives latency_s later. With cards and without an order, every pair of workers has a
         link in each direction, and activations wait for their receive (`PostedReceives`); otherwise a boundary has
         links that the minibatches of a copy take in turn.
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

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipeplan.errors import InputError
from pipeplan.simulation.events import Pass, SimulatedEvents
from pipeplan.simulation.fair_share import RING_WEIGHT, SharedNetwork, Use
from pipeplan.simulation.message_order import message_order
from pipeplan.simulation.scenario import Scenario, StageLoad
from pipeplan.simulation.serial_links import Carrier, LinkJob, PostedReceives, SerialLink, boundary_links
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan_launch.plan.one_order import Direction
from pipeplan_launch.plan.schedule import Action, ActionKind, device_actions

EVENTS_BETWEEN_LOOKS = 256
"""The clock is looked at once for so many events."""


@dataclass(eq=False)
class _Worker:
    """The state of one stage on one replica."""

    stage: int
    replica: int
    arrived: set[Action] = field(default_factory=set)
    """Actions whose message has arrived, or updates whose all-reduce lets them start."""
    awaiting_backward: set[int] = field(default_factory=set)
    """Minibatches between the end of their forward and the start of their backward pass."""
    joined: set[int] = field(default_factory=set)
    """Minibatches whose gradients of the weights were computed with those of the inputs."""
    awaits_at_once: set[int] = field(default_factory=set)
    """Groups whose update directly follows the start of their all-reduce."""


@dataclass
class _Seat:
    """A worker: the actions that it runs in order, each with the stage, of which it may have several."""

    stream: Iterator[tuple[_Worker, Action]]
    head: tuple[_Worker, Action] | None = None
    busy: bool = False

    def pop(self) -> None:
        """Move on to the next action."""
        self.head = next(self.stream, None)


class _Engine:
    def __init__(self, scenario: Scenario, minibatches: int) -> None:
        self._scenario = scenario
        self._last = len(scenario.stages) - 1
        self._now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0
        self._actions: list[Pass] = []
        self._joined: dict[tuple[int, int], int] = {}
        self._waited: dict[tuple[int, int], float] = {}
        """(stage, group) -> time since which the drained replicas have only waited for this all-reduce."""
        self._workers = [
            [_Worker(stage, replica) for replica in range(load.replicas)] for stage, load in enumerate(scenario.stages)
        ]
        self._seats = self._make_seats(minibatches)
        self._activations = [boundary_links(f"stage {i + 1} → {i + 2}", hops) for i, hops in enumerate(scenario.hops)]
        self._gradients = [boundary_links(f"stage {i + 2} → {i + 1}", hops) for i, hops in enumerate(scenario.hops)]
        self._network = None if scenario.cards is None else SharedNetwork(lambda: self._now, self._at)
        self._carrier = Carrier(lambda: self._now, self._at, self._network)
        self._order = message_order(scenario, minibatches)
        pairs = self._network is not None and self._order is None
        self._receives = PostedReceives([load.replicas for load in scenario.stages]) if pairs else None
        self._pairs: dict[tuple[int, int, ActionKind], SerialLink] = {}
        """The link of each two workers, by the kind of action that makes its messages."""
        # Copies of a pipeline are in different components, and all stages share the link between these.
        shared = SerialLink("all-reduce")
        self._sync = [
            shared if scenario.copies > 1 else SerialLink(f"all-reduce of stage {stage + 1}")
            for stage in range(self._last + 1)
        ]

    def _make_seats(self, minibatches: int) -> dict[tuple[int, int], _Seat]:
        """The worker of every (stage, replica)."""
        seats: dict[tuple[int, int], _Seat] = {}
        by_device: dict[tuple[int, int], _Seat] = {}
        for worker in (worker for stage in self._workers for worker in stage):
            place, device = (worker.stage, worker.replica), self._scenario.shapes[worker.stage].device
            if device is None:
                seats[place] = _Seat(self._stream(worker, minibatches))
                continue
            if (device, worker.replica) not in by_device:
                by_device[device, worker.replica] = _Seat(self._device_stream(device, worker.replica, minibatches))
            seats[place] = by_device[device, worker.replica]
        return seats

    def _stream(self, worker: _Worker, minibatches: int) -> Iterator[tuple[_Worker, Action]]:
        scenario = self._scenario
        for action in scenario.schedule.stream(scenario.shapes, worker.stage, worker.replica, minibatches):
            yield worker, action

    def _device_stream(self, device: int, replica: int, minibatches: int) -> Iterator[tuple[_Worker, Action]]:
        scenario = self._scenario
        for stage, action in device_actions(scenario.schedule, scenario.shapes, device, replica, minibatches):
            yield self._workers[stage][replica], action

    def run(self, deadline: Deadline) -> SimulatedEvents:
        """Play all streams to their ends.

        Raises an `InputError` on a deadlock, with a worker and what it waits for, and `OutOfTime` at the deadline.
        """
        seats = list({id(seat): seat for seat in self._seats.values()}.values())
        for seat in seats:
            seat.pop()
        for seat in seats:
            self._advance_seat(seat)
        while self._events:
            self._now, _, number, event = heapq.heappop(self._events)
            event()
            if number % EVENTS_BETWEEN_LOOKS == 0:
                deadline.check()
        stuck = next((seat.head for seat in seats if seat.head is not None), None)
        if stuck is not None:
            raise InputError(self._deadlock(*stuck))
        if not math.isfinite(self._now):
            raise InputError("the times of the plan are too long to add up")
        transfers = sorted(self._carrier.transfers, key=lambda done: done.start_s)
        return SimulatedEvents(tuple(self._actions), tuple(transfers), self._now)

    def _at(self, time_s: float, event: Callable[[], None], rank: int = -1) -> None:
        """Schedule an event. Events at the same time happen by rank, then in the order in which they were scheduled."""
        self._count += 1
        heapq.heappush(self._events, (time_s, rank, self._count, event))

    def _advance(self, worker: _Worker) -> None:
        """Start all actions that the worker of this stage can start now."""
        self._advance_seat(self._seats[worker.stage, worker.replica])

    def _advance_seat(self, seat: _Seat) -> None:
        while not seat.busy and seat.head is not None and self._may_start(*seat.head):
            worker, action = seat.head
            load = self._scenario.stages[worker.stage]
            seat.pop()
            worker.arrived.discard(action)
            match action.kind:
                case ActionKind.FORWARD:
                    if self._receives is not None:
                        self._receives.take(worker.stage, action.index)
                    self._compute(worker, action, load.forward_s)
                case ActionKind.BACKWARD:
                    worker.awaiting_backward.remove(action.index)
                    joined = self._is_joined(seat, worker, action)
                    self._compute(worker, action, load.backward_s - (0.0 if joined else load.weights_s))
                case ActionKind.WEIGHTS:
                    joined = action.index in worker.joined
                    worker.joined.discard(action.index)
                    self._compute(worker, action, 0.0 if joined else load.weights_s)
                case ActionKind.REDUCE:
                    self._join(worker, action.index)
                case ActionKind.UPDATE:
                    began_s = self._waited.get((worker.stage, action.index))
                    self._compute(worker, action, self._parts(load)[1] + load.step_s, began_s)

    def _is_joined(self, seat: _Seat, worker: _Worker, action: Action) -> bool:
        """Whether W directly follows B on a worker with several stages, and no other worker waits for B's gradient."""
        follows = seat.head == (worker, Action(ActionKind.WEIGHTS, action.index))
        shapes, stage = self._scenario.shapes, worker.stage
        at_home = stage == 0 or shapes[stage - 1].device == shapes[stage].device
        if follows and at_home and self._scenario.schedule.virtual is not None:
            worker.joined.add(action.index)
        return action.index in worker.joined

    def _may_start(self, worker: _Worker, action: Action) -> bool:
        if self._order is not None and not self._order.may_compute((worker.stage, worker.replica), action):
            return False
        return self._ready(worker, action)

    def _ready(self, worker: _Worker, action: Action) -> bool:
        match action.kind:
            case ActionKind.FORWARD:
                return worker.stage == 0 or action in worker.arrived
            case ActionKind.BACKWARD:
                gradient_ready = worker.stage == self._last or action in worker.arrived
                return gradient_ready and action.index in worker.awaiting_backward
            case ActionKind.WEIGHTS | ActionKind.REDUCE:
                return True
            case ActionKind.UPDATE:
                return action in worker.arrived

    def _compute(self, worker: _Worker, action: Action, duration_s: float, began_s: float | None = None) -> None:
        """Keep a worker busy for `duration_s`; `began_s` is the time since which it has waited for the same action."""
        self._seats[worker.stage, worker.replica].busy = True
        start_s = self._now if began_s is None else began_s
        cores = self._cores(worker)
        if cores and self._network is not None:

            def computed() -> None:
                self._actions.append(Pass(worker.stage, worker.replica, action, start_s, self._now))
                self._finish(worker, action)

            self._network.start(duration_s, cores, computed)
            return
        self._actions.append(Pass(worker.stage, worker.replica, action, start_s, self._now + duration_s))
        # Replicas that finish at the same time send in the order of their minibatches.
        self._at(self._now + duration_s, lambda: self._finish(worker, action), action.index)

    def _cores(self, worker: _Worker) -> Use:
        """Use of the server's cores by a worker that computes, where they are shared."""
        cards = self._scenario.cards
        return {} if cards is None else cards.computing(self._scenario.stages[worker.stage].workers[worker.replica])

    def _finish(self, worker: _Worker, action: Action) -> None:
        self._seats[worker.stage, worker.replica].busy = False
        match action.kind:
            case ActionKind.FORWARD:
                worker.awaiting_backward.add(action.index)
                if worker.stage < self._last:
                    self._send(self._activations[worker.stage], worker.stage, worker.stage + 1, action)
            case ActionKind.BACKWARD if worker.stage > 0:
                self._send(self._gradients[worker.stage - 1], worker.stage - 1, worker.stage - 1, action)
            case _:
                pass
        if self._order is not None:
            self._order.computed(worker.stage, action)
        self._advance(worker)

    def _send(self, links: list[list[SerialLink]], boundary: int, target: int, action: Action) -> None:
        """Queue a message on its link; it arrives at the receiver after the transfer and the latency."""
        turn, copy = divmod(action.index, self._scenario.copies)
        hop = self._scenario.hops[boundary][copy]
        busy_s = hop.transmit_s if action.kind is ActionKind.FORWARD else hop.back_s
        replicas = self._workers[target]
        receiver = replicas[action.index % len(replicas)]
        use = self._use(action, boundary, copy)
        forward = action.kind is ActionKind.FORWARD
        sender = boundary if forward else boundary + 1
        message = Direction.ACTIVATIONS if forward else Direction.GRADIENTS, sender, action.index

        def flown() -> None:
            self._at(self._now + hop.latency_s, lambda: self._arrive(receiver, action))
            if self._order is not None:
                self._order.arrived(*message)
                self._advance(self._workers[sender][action.index % len(self._workers[sender])])

        job = LinkJob(action.index, busy_s, 0.0, use, begun=lambda _: None, flown=flown)
        link = links[copy][turn % hop.links]
        if self._receives is not None:
            own = self._link_of_pair(boundary, action, link.row)
            self._receives.start(target, action, lambda: self._carrier.carry(own, job))
        elif self._order is None:
            self._carrier.carry(link, job)
        else:
            self._order.made(*message, lambda: self._carrier.carry(link, job))

    def _ends(self, boundary: int, action: Action) -> tuple[int, int]:
        """The workers that send and receive the message that this action makes at a boundary."""
        ends = self._scenario.stages[boundary : boundary + 2]
        before, behind = (load.workers[action.index % load.replicas] for load in ends)
        return (before, behind) if action.kind is ActionKind.FORWARD else (behind, before)

    def _link_of_pair(self, boundary: int, action: Action, row: str) -> SerialLink:
        """The link between the two workers of a message that this action makes at a boundary."""
        sender, receiver = self._ends(boundary, action)
        pair = f"worker {sender} → {receiver}"
        return self._pairs.setdefault((sender, receiver, action.kind), SerialLink(row, pair))

    def _use(self, action: Action, boundary: int, copy: int) -> Use:
        """Use of cards by a message: activations to the next stage, or gradients back."""
        if self._scenario.cards is None:
            return {}
        sender, receiver = self._ends(boundary, action)
        return self._scenario.cards.message(sender, receiver, self._scenario.hops[boundary][copy].bandwidth)

    def _arrive(self, worker: _Worker, action: Action) -> None:
        worker.arrived.add(action)
        self._advance(worker)

    def _join(self, worker: _Worker, group: int) -> None:
        """Let one replica join the all-reduce of its group, which starts when the last replica joins."""
        update = Action(ActionKind.UPDATE, group)
        if self._seats[worker.stage, worker.replica].head == (worker, update):
            worker.awaits_at_once.add(group)
        key = worker.stage, group
        self._joined[key] = self._joined.get(key, 0) + 1
        replicas = self._workers[worker.stage]
        if self._joined[key] < len(replicas):
            return
        del self._joined[key]
        hidden, exposed = self._parts(self._scenario.stages[worker.stage])
        # Under a flush, replicas go on at the end of the all-reduce, which cards may delay, and not at its start.
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
        self._carrier.carry(self._sync[worker.stage], LinkJob(group, hidden, exposed, use, begun, flown, RING_WEIGHT))

    def _release(self, worker: _Worker, update: Action, time_s: float) -> None:
        self._at(time_s, lambda: self._arrive(worker, update))

    def _parts(self, load: StageLoad) -> tuple[float, float]:
        """The hidden and the exposed part of an all-reduce, in seconds."""
        overlap = self._scenario.overlap
        if self._scenario.drains:
            left_s = load.sync_s if load.left_s is None else load.left_s
            return (left_s, 0.0) if self._network is not None else (0.0, left_s)
        return load.hidden_s(overlap), load.exposed_s(overlap)

    def _deadlock(self, worker: _Worker, action: Action) -> str:
        load = self._scenario.stages[worker.stage]
        return (
            f"schedule {self._scenario.schedule.name} comes to a deadlock after {self._now:g} s: worker "
            f"{load.workers[worker.replica]} (stage {worker.stage + 1}) waits forever at {action}; replicas and "
            f"depths are {[(stage.replicas, stage.depth) for stage in self._scenario.stages]}: solve again with --force"
        )


def simulate_schedule(scenario: Scenario, minibatches: int, deadline: Deadline = NO_DEADLINE) -> SimulatedEvents:
    """Simulate a plan for a number of minibatches.

    Raises an `InputError` where its schedule comes to a deadlock, and `OutOfTime` where it does not end in time.
    """
    return _Engine(scenario, minibatches).run(deadline)
