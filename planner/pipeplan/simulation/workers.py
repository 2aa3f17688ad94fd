"""The workers and the links of a simulation, and the routes of messages and all-reduces.

A link carries one message or one all-reduce at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipeplan.simulation.events import FIRST, EventQueue, Transfer
from pipeplan.simulation.fair_share import RING_WEIGHT, FlowKind, SharedNetwork, Use, flow_kind
from pipeplan.simulation.scenario import Scenario, StageLoad
from pipeplan_launch.plan.schedule import Action, device_actions, own_minibatches

Flown = Callable[[], None]
"""A function that is called at the end of a flow."""
Begun = Callable[[float], None] | None
"""A function that is called with the start time when the link begins with a job."""


@dataclass(eq=False, slots=True)
class SerialLink:
    """A link and the jobs that wait for it."""

    row: str
    pair: str = ""
    waiting: deque[tuple[Route, int, Flown, Begun]] = field(default_factory=deque)
    busy: bool = False


@dataclass(eq=False, slots=True)
class Route:
    """The common properties of all messages between two workers, or of all all-reduces of a stage.

    A message or all-reduce consists of a flow, which cards may slow down, and a second part, which they do not.
    """

    link: SerialLink
    flow_s: float
    """Duration of the flow at full speed."""
    rest_s: float
    """Duration of the second part."""
    kind: int
    """The kind of the flow, as an index into the kinds of the `SharedNetwork`."""
    latency_s: float = 0.0
    """Time from the end of a message's flow to its arrival. The link is free during this time."""


class Carrier:
    """Carries the jobs of links in simulated time, and records when each link was busy."""

    def __init__(self, queue: EventQueue, network: SharedNetwork) -> None:
        """Create a carrier whose flows share the cards of the network."""
        self._queue, self._network = queue, network
        self.transfers: list[Transfer] = []

    def carry(self, route: Route, number: int, flown: Flown, begun: Begun = None) -> None:
        """Queue a job on the link of its route, with the number of its minibatch or group."""
        if route.link.busy:
            route.link.waiting.append((route, number, flown, begun))
        else:
            self._begin(route, number, flown, begun)

    def _begin(self, route: Route, number: int, flown: Flown, begun: Begun) -> None:
        """Begin with a job on a free link."""
        start_s, route.link.busy = self._queue.now, True
        if begun is not None:
            begun(start_s)
        self._network.start(route.flow_s, route.kind, self._flown, route, number, flown, start_s)

    def _flown(self, route: Route, number: int, flown: Flown, start_s: float) -> None:
        flown()
        if route.rest_s > 0:
            self._queue.at(self._queue.now + route.rest_s, FIRST, self._done, route.link, number, start_s)
        else:
            self._done(route.link, number, start_s)

    def _done(self, link: SerialLink, number: int, start_s: float) -> None:
        if self._queue.now > start_s:
            self.transfers.append(Transfer(link.row, number, start_s, self._queue.now, link.pair))
        link.busy = False
        if link.waiting:
            self._begin(*link.waiting.popleft())


@dataclass(eq=False, slots=True)
class Worker:
    """The state of one stage on one replica."""

    stage: int
    replica: int
    load: StageLoad
    cores: int | None = None
    """The kind of the flow that represents the worker's computing, if workers share the server's cores; else None."""
    seat: Seat = field(init=False)
    routes: dict[Worker, Route] = field(default_factory=dict)
    """The routes to the workers of the next stage and of the previous stage."""
    activations: set[int] = field(default_factory=set)
    """Minibatches whose activations have arrived."""
    gradients: set[int] = field(default_factory=set)
    """Minibatches whose gradients have arrived."""
    reduced: set[int] = field(default_factory=set)
    """Groups whose update may start, because their all-reduce has advanced far enough."""
    awaiting_backward: set[int] = field(default_factory=set)
    """Minibatches between the end of their forward and the start of their backward pass."""
    joined: set[int] = field(default_factory=set)
    """Minibatches whose gradients of the weights were computed together with those of the inputs."""
    awaits_at_once: set[int] = field(default_factory=set)
    """Groups whose update directly follows the start of their all-reduce."""
    taken: int = 0
    """Number of minibatches whose activations the worker has received and taken."""
    held: dict[int, tuple[Worker, Action]] = field(default_factory=dict)
    """Messages whose receive is not posted yet, by minibatch: (sender, action that produced the message)."""

    @property
    def number(self) -> int:
        """The worker's number in the cluster."""
        return self.load.workers[self.replica]


@dataclass(eq=False, slots=True)
class Seat:
    """A worker of the cluster, which may have several stages, and the actions that it runs in order."""

    stream: Iterator[tuple[Worker, Action]]
    head: tuple[Worker, Action] | None = None
    """The next action."""
    busy: bool = False
    left_s: float = 0.0
    """Total time of the passes that have not begun, without W, in seconds."""

    def pop(self) -> None:
        """Move on to the next action."""
        self.head = next(self.stream, None)


def make_workers(scenario: Scenario) -> list[list[Worker]]:
    """The replicas of every stage."""
    return [
        [Worker(stage, replica, load.of_replica(replica)) for replica in range(load.replicas)]
        for stage, load in enumerate(scenario.stages)
    ]


def make_seats(scenario: Scenario, workers: list[list[Worker]], minibatches: int) -> list[Seat]:
    """The seats of all workers."""
    seats: dict[tuple[int | None, int, int], Seat] = {}
    for worker in (worker for stage in workers for worker in stage):
        device, load = scenario.shapes[worker.stage].device, worker.load
        place = device, worker.stage if device is None else -1, worker.replica
        if place not in seats:
            seats[place] = Seat(_stream(scenario, workers, worker, minibatches))
        worker.seat = seats[place]
        passes = len(own_minibatches(worker.replica, load.replicas, minibatches, load.shares))
        worker.seat.left_s += passes * (load.forward_s + load.backward_s - load.weights_s)
    for seat in seats.values():
        seat.pop()
    return list(seats.values())


def _stream(
    scenario: Scenario, workers: list[list[Worker]], worker: Worker, minibatches: int
) -> Iterator[tuple[Worker, Action]]:
    """The actions of a worker in order, over all stages that the worker runs."""
    schedule, shapes, replica = scenario.schedule, scenario.shapes, worker.replica
    device = shapes[worker.stage].device
    if device is None:
        for action in schedule.stream(shapes, worker.stage, replica, minibatches):
            yield worker, action
    else:
        for stage, action in device_actions(schedule, shapes, device, replica, minibatches):
            yield workers[stage][replica], action


class Routes:
    """Sets the routes between workers. Holds the routes of all-reduces and the kinds of all flows."""

    def __init__(self, scenario: Scenario, workers: list[list[Worker]], minibatches: int, *, pairs: bool) -> None:
        """Set all routes. `pairs` says whether each pair of workers has its own link in each direction."""
        self._scenario, self._minibatches, self._has_pairs = scenario, minibatches, pairs
        self._pairs: dict[tuple[int, int, bool], SerialLink] = {}
        """The link of each pair of workers, by (sender, receiver, whether it carries activations)."""
        self.kinds: list[FlowKind] = []
        boundaries = range(len(workers) - 1)
        for boundary in boundaries:
            self._connect(boundary, workers[boundary], workers[boundary + 1], forward=True)
        for boundary in reversed(boundaries if scenario.schedule.trains else ()):
            self._connect(boundary, workers[boundary + 1], workers[boundary], forward=False)
        self.reduces = self._all_reduces()
        """The route of the all-reduces of every stage."""
        for worker in (worker for stage in workers for worker in stage):
            if scenario.cards is not None and (use := scenario.cards.computing(worker.number)):
                worker.cores = self._kind(use)

    def _kind(self, use: Use, weight: float = 1.0, *, is_message: bool = False) -> int:
        """Add a kind of flow and return its index."""
        self.kinds.append(flow_kind(use, weight, is_message=is_message))
        return len(self.kinds) - 1

    def _connect(self, boundary: int, senders: list[Worker], receivers: list[Worker], *, forward: bool) -> None:
        """Set the routes of all messages from the workers of a stage to the workers of a neighbouring stage."""
        name = f"stage {senders[0].stage + 1} → {receivers[0].stage + 1}"
        links: dict[str, SerialLink] = {}
        for index in range(min(math.lcm(len(senders), len(receivers)), self._minibatches)):
            sender, receiver = senders[index % len(senders)], receivers[index % len(receivers)]
            ends = sender.number, receiver.number
            turn, copy = divmod(index, self._scenario.copies)
            hop = self._scenario.hops[boundary][copy]
            row = name if self._scenario.copies == 1 else f"{name}, copy {copy + 1}"
            row = row if hop.links == 1 else f"{row}, link {turn % hop.links + 1}"
            if self._has_pairs:
                link = SerialLink(row, f"worker {ends[0]} → {ends[1]}")
                link = self._pairs.setdefault((*ends, forward), link)
            else:
                link = links.setdefault(row, SerialLink(row))
            cards = self._scenario.cards
            use = {} if cards is None else cards.message(*ends, hop.bandwidth)
            kind = self._kind(use, is_message=self._has_pairs)
            sent_s = hop.transmit_s if forward else hop.back_s
            sender.routes[receiver] = Route(link, sent_s, 0.0, kind, hop.latency_s)

    def _all_reduces(self) -> list[Route]:
        scenario, cards = self._scenario, self._scenario.cards
        # The copies of a pipeline are in different components. All stages share the link between components.
        shared = SerialLink("all-reduce")
        routes = []
        for stage, load in enumerate(scenario.stages):
            link = shared if scenario.copies > 1 else SerialLink(f"all-reduce of stage {stage + 1}")
            kind = self._kind({} if cards is None else cards.ring(stage), RING_WEIGHT)
            routes.append(Route(link, *self._parts(load), kind))
        return routes

    def _parts(self, load: StageLoad) -> tuple[float, float]:
        """The hidden and the exposed part of an all-reduce, in seconds."""
        overlap = self._scenario.overlap
        if self._scenario.drains:
            left_s = load.sync_s if load.left_s is None else load.left_s
            return (left_s, 0.0) if self._scenario.cards is not None else (0.0, left_s)
        return load.hidden_s(overlap), load.exposed_s(overlap)
