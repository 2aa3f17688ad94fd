"""The simulator: a deterministic discrete-event simulation of a plan's schedule, independent of the real clock.

A worker runs the actions of its stream in order, one at a time. F and B wait for their message.

A link carries one message at a time, first come, first served. The link is busy for transmit_s (for gradients back_s),
and the message arrives latency_s later. With cards, every pair of workers has a link in each direction, and activations
wait until their receive is posted. Without cards, the minibatches of a copy use the links of a boundary in turn.

Action R joins the all-reduce of the group, which starts when all replicas have joined and the previous one has ended.
Action U keeps the worker busy for exposed_s, and for the optimiser's step if B does not include it. The rest of the
all-reduce, hidden_s, overlaps with computing. If U directly follows its R, the hidden part runs after the exposed part.
If other actions come between them, the hidden part runs first, and U waits for its end.

With `Scenario.cards`, a message is a flow over the network cards that it crosses, and so is the hidden part of an
all-reduce. Flows share cards (`fair_share`), and take as long as the cards allow. Under a flush the flow is the whole
all-reduce, or the part that remains after the last backward pass.
"""

from __future__ import annotations

import math
from functools import partial

from pipeplan.errors import InputError
from pipeplan.simulation.events import FIRST, EventQueue, Pass, SimulatedEvents
from pipeplan.simulation.fair_share import SharedNetwork
from pipeplan.simulation.scenario import Scenario
from pipeplan.simulation.workers import Carrier, Routes, Seat, Worker, make_seats, make_workers
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan_launch.plan.schedule import POSTED_RECEIVES, Action, ActionKind

EVENTS_BETWEEN_LOOKS = 256
"""Number of events between two checks of the deadline and the limit."""
FORWARD, BACKWARD, WEIGHTS, REDUCE, UPDATE = ActionKind


class TooSlow(Exception):
    """A simulated schedule takes longer than the limit of the simulation."""


class _Engine:
    def __init__(self, scenario: Scenario, minibatches: int) -> None:
        self._scenario = scenario
        self._queue = EventQueue()
        self._actions: list[Pass] = []
        self._has_pairs = scenario.cards is not None
        """Whether each pair of workers has its own link in each direction, and workers post receives."""
        self._workers = make_workers(scenario)
        self._seats = make_seats(scenario, self._workers, minibatches)
        routes = Routes(scenario, self._workers, minibatches, pairs=self._has_pairs)
        self._reduces = routes.reduces
        self._network = SharedNetwork(self._queue, routes.kinds)
        self._carrier = Carrier(self._queue, self._network)
        self._joined: dict[tuple[int, int], int] = {}
        """Number of replicas that have joined an all-reduce, by (stage, group)."""
        self._waited: dict[tuple[int, int], float] = {}
        """Time from which the drained replicas only wait for an all-reduce, by (stage, group)."""

    def run(self, deadline: Deadline, limit_s: float) -> SimulatedEvents:
        """Run all streams to their ends.

        Raises an `InputError` on a deadlock, with a worker and the action that it waits for. Raises `OutOfTime` at the
        deadline, and `TooSlow` as soon as the first stage certainly ends after `limit_s`.
        """
        queue, count = self._queue, 0
        for seat in self._seats:
            self._advance(seat)
        while queue.pop():
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
        """Raise `TooSlow` if the remaining passes end too late. The first stage ends after the passes of all stages."""
        if self._seats[0].head is not None and self._queue.now + max(seat.left_s for seat in self._seats) > limit_s:
            raise TooSlow

    def _advance(self, seat: Seat) -> None:
        """Start all actions that a worker can start now."""
        while not seat.busy and seat.head is not None:
            worker, action = seat.head
            kind, index, load = action.kind, action.index, worker.load
            if kind is FORWARD:
                if worker.stage > 0 and index not in worker.activations:
                    return
                seat.pop()
                worker.activations.discard(index)
                worker.seat.left_s -= load.forward_s
                self._post_receive(worker, index)
                self._compute(worker, action, load.forward_s)
            elif kind is BACKWARD:
                is_last = worker.stage == len(self._workers) - 1
                if index not in worker.awaiting_backward or not (is_last or index in worker.gradients):
                    return
                seat.pop()
                worker.gradients.discard(index)
                worker.awaiting_backward.remove(index)
                worker.seat.left_s -= load.backward_s - load.weights_s
                joined = load.weights_s > 0 and self._joins_weights(worker, index)
                self._compute(worker, action, load.backward_s - (0.0 if joined else load.weights_s))
            elif kind is WEIGHTS:
                seat.pop()
                joined = index in worker.joined
                worker.joined.discard(index)
                self._compute(worker, action, 0.0 if joined else load.weights_s + load.split_s)
            elif kind is REDUCE:
                seat.pop()
                self._join(worker, index)
            else:
                if index not in worker.reduced:
                    return
                seat.pop()
                worker.reduced.discard(index)
                busy_s = self._reduces[worker.stage].rest_s + load.step_s
                self._compute(worker, action, busy_s, self._waited.get((worker.stage, index)))

    def _joins_weights(self, worker: Worker, index: int) -> bool:
        """Whether W directly follows B on a worker with several stages, and no other worker waits for B's gradient."""
        follows = worker.seat.head == (worker, Action(WEIGHTS, index))
        shapes, stage = self._scenario.shapes, worker.stage
        at_home = stage == 0 or shapes[stage - 1].device == shapes[stage].device
        if follows and at_home and self._scenario.schedule.virtual is not None:
            worker.joined.add(index)
        return index in worker.joined

    def _compute(self, worker: Worker, action: Action, duration_s: float, began_s: float | None = None) -> None:
        """Keep a worker busy for `duration_s`; `began_s` is the time since which it has waited for this action."""
        worker.seat.busy = True
        now = self._queue.now
        start_s = now if began_s is None else began_s
        if worker.cores is not None:
            self._network.start(duration_s, worker.cores, self._computed, worker, action, start_s)
            return
        self._actions.append(Pass(worker.stage, worker.replica, action, start_s, now + duration_s))
        # Replicas that finish at the same time send in the order of their minibatches.
        self._queue.at(now + duration_s, action.index, self._finish, worker, action)

    def _computed(self, worker: Worker, action: Action, start_s: float) -> None:
        """Finish an action that shared the cores of its server."""
        self._actions.append(Pass(worker.stage, worker.replica, action, start_s, self._queue.now))
        self._finish(worker, action)

    def _finish(self, worker: Worker, action: Action) -> None:
        worker.seat.busy = False
        if action.kind is FORWARD:
            worker.awaiting_backward.add(action.index)
            if worker.stage < len(self._workers) - 1:
                self._send(worker, self._workers[worker.stage + 1], action)
        elif action.kind is BACKWARD and worker.stage > 0:
            self._send(worker, self._workers[worker.stage - 1], action)
        self._advance(worker.seat)

    def _send(self, sender: Worker, receivers: list[Worker], action: Action) -> None:
        """Queue a message on its link. The message arrives at the receiver after the transfer and the latency.

        The executor posts the receives of activations a few minibatches ahead. Activations leave when their receive is
        posted. Receives of gradients are posted before the activations leave, so gradients never wait.
        """
        receiver = receivers[action.index % len(receivers)]
        if (
            self._has_pairs
            and action.kind is FORWARD
            and action.index // len(receivers) >= receiver.taken + POSTED_RECEIVES
        ):
            receiver.held[action.index] = sender, action
        else:
            self._carry(sender, receiver, action)

    def _post_receive(self, worker: Worker, minibatch: int) -> None:
        """Record that a worker has taken the activations of a minibatch, and post the next receive."""
        replicas = worker.load.replicas
        worker.taken = minibatch // replicas + 1
        if (held := worker.held.pop(minibatch + POSTED_RECEIVES * replicas, None)) is not None:
            sender, action = held
            self._carry(sender, worker, action)

    def _carry(self, sender: Worker, receiver: Worker, action: Action) -> None:
        flown = partial(self._message_flown, sender, receiver, action)
        self._carrier.carry(sender.routes[receiver], action.index, flown)

    def _message_flown(self, sender: Worker, receiver: Worker, action: Action) -> None:
        arrived = receiver.activations if action.kind is FORWARD else receiver.gradients
        latency_s = sender.routes[receiver].latency_s
        if latency_s > 0:
            self._queue.at(self._queue.now + latency_s, FIRST, self._arrive, receiver, arrived, action.index)
        else:
            self._arrive(receiver, arrived, action.index)

    def _arrive(self, worker: Worker, arrived: set[int], index: int) -> None:
        """Record that activations or gradients of a minibatch have arrived, or that an update may start."""
        arrived.add(index)
        self._advance(worker.seat)

    def _join(self, worker: Worker, group: int) -> None:
        """Let one replica join the all-reduce of its group, which starts when the last replica joins."""
        if worker.seat.head == (worker, Action(UPDATE, group)):
            worker.awaits_at_once.add(group)
        key, replicas = (worker.stage, group), self._workers[worker.stage]
        joined = self._joined.pop(key, 0) + 1
        if joined < len(replicas):
            self._joined[key] = joined
            return
        # Under a flush, replicas continue at the end of the all-reduce, which cards may delay, and not at its start.
        waits = self._scenario.cards is not None and self._scenario.drains
        early = [replica for replica in replicas if group in replica.awaits_at_once and not waits]
        late = [replica for replica in replicas if replica not in early]
        for replica in replicas:
            replica.awaits_at_once.discard(group)

        def begun(start_s: float) -> None:
            if waits:
                self._waited[key] = start_s
            for replica in early:
                self._queue.at(start_s, FIRST, self._arrive, replica, replica.reduced, group)

        def flown() -> None:
            for replica in late:
                self._queue.at(self._queue.now, FIRST, self._arrive, replica, replica.reduced, group)

        self._carrier.carry(self._reduces[worker.stage], group, flown, begun)

    def _deadlock(self, worker: Worker, action: Action) -> str:
        load = worker.load
        return (
            f"schedule {self._scenario.schedule.name} comes to a deadlock after {self._queue.now:g} s: worker "
            f"{load.workers[worker.replica]} (stage {worker.stage + 1}) waits forever at {action}; replicas and "
            f"depths are {[(stage.replicas, stage.depth) for stage in self._scenario.stages]}: solve again with --force"
        )


def simulate_schedule(
    scenario: Scenario, minibatches: int, deadline: Deadline = NO_DEADLINE, limit_s: float = math.inf
) -> SimulatedEvents:
    """Simulate a plan for a number of minibatches.

    Raises an `InputError` if the schedule comes to a deadlock, `OutOfTime` if the simulation does not end in time, and
    `TooSlow` if the first stage certainly ends after `limit_s`.
    """
    return _Engine(scenario, minibatches).run(deadline, limit_s)
