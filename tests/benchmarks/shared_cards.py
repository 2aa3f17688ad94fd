"""Does a pipeline keep its pace where a network card is near saturation? Messages and rings as flows that share cards.

    python tests/benchmarks/shared_cards.py

Replays the executor's own action streams on servers of equal workers. A message is a flow from its sender's card to its
receiver's, an all-reduce one flow through every card of its ring at a common rate, since each member waits for its
neighbour chunk by chunk. Traffic inside a server is free. Plan 15-1 on 4 servers of 4, with the figures of VGG-16 on
cluster A (minibatch 64): the last stage's server receives 12 of 15 activations, sends 12 of 15 gradients, and the ring
passes through it both ways.

    fair      every flow gets its max-min fair share of the cards, as TCP does over a while
    first     the flow that began first takes what it can, the others what is left
    ring      the all-reduce goes first, then as `first`
    messages  messages go first
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from pipeplan_launch.schedule import SCHEDULES, Action, Kind, StageShape

EPSILON = 1e-12
Card = tuple[int, bool]
"""Server, and whether it is the outgoing direction."""


@dataclass(frozen=True)
class Setting:
    """A plan with its times, in seconds, on servers of `per_server` workers in order."""

    replicas: tuple[int, ...]
    depths: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    message_s: tuple[float, ...]
    """Of one message across each boundary, either way, with a card alone."""
    ring_s: tuple[float, ...]
    """Of each stage's all-reduce, alone."""
    per_server: int

    def server(self, stage: int, replica: int) -> int:
        """Where a replica is."""
        return (sum(self.replicas[:stage]) + replica) // self.per_server

    def ring_cards(self, stage: int) -> tuple[Card, ...]:
        """The cards that the ring of a stage passes."""
        servers = sorted({self.server(stage, replica) for replica in range(self.replicas[stage])})
        return tuple((server, out) for server in servers for out in (False, True)) if len(servers) > 1 else ()


@dataclass
class Flow:
    """Something under way; `left` is the time that it still needs with its cards alone."""

    cards: tuple[Card, ...]
    left: float
    is_ring: bool
    done: Callable[[], None]
    rate: float = field(default=0.0)


def share_fairly(flows: Sequence[Flow]) -> None:
    """Max-min fair rates by progressive filling: the card with the least for each of its flows is filled first."""
    free: dict[Card, float] = defaultdict(lambda: 1.0)
    open_flows = list(flows)
    while open_flows:
        count: dict[Card, int] = defaultdict(int)
        for flow in open_flows:
            for card in flow.cards:
                count[card] += 1
        card = min(count, key=lambda one: (free[one] / count[one], one))
        rate = free[card] / count[card]
        for flow in [flow for flow in open_flows if card in flow.cards]:
            flow.rate = rate
            open_flows.remove(flow)
            for crossed in flow.cards:
                free[crossed] = max(0.0, free[crossed] - rate)


def share_in_order(flows: Sequence[Flow]) -> None:
    """Each in turn takes what its cards still have."""
    free: dict[Card, float] = defaultdict(lambda: 1.0)
    for flow in flows:
        flow.rate = min(free[card] for card in flow.cards)
        for card in flow.cards:
            free[card] -= flow.rate


SHARING: dict[str, Callable[[Sequence[Flow]], None]] = {
    "fair": share_fairly,
    "first": share_in_order,
    "ring": lambda flows: share_in_order(sorted(flows, key=lambda flow: not flow.is_ring)),
    "messages": lambda flows: share_in_order(sorted(flows, key=lambda flow: flow.is_ring)),
}


class Replay:
    """Runs every replica's stream; computing and flows advance together."""

    def __init__(self, setting: Setting, sharing: str, minibatches: int) -> None:
        self.setting, self.share = setting, SHARING[sharing]
        shapes = [StageShape(*shape) for shape in zip(setting.replicas, setting.depths, strict=True)]
        stream = SCHEDULES["1f1b-stashing"].stream
        self.workers = [(stage, replica) for stage, count in enumerate(setting.replicas) for replica in range(count)]
        self.todo = {worker: list(stream(shapes, *worker, minibatches))[::-1] for worker in self.workers}
        self.here: set[tuple[int, int, Action]] = set()
        self.joined: dict[tuple[int, int], int] = defaultdict(int)
        self.busy: set[tuple[int, int]] = set()
        self.flows: list[Flow] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = itertools.count()
        self.now = 0.0
        self.ends: list[float] = []
        self.carried: dict[Card, float] = defaultdict(float)

    def run(self) -> list[float]:
        """When the first stage ends each backward pass."""
        for worker in self.workers:
            self._advance(worker)
        while self.events or self.flows:
            if self.flows:
                self.share(self.flows)
            soonest = min((flow.left / flow.rate for flow in self.flows if flow.rate > EPSILON), default=float("inf"))
            event_s = self.events[0][0] if self.events else float("inf")
            step = min(soonest, event_s - self.now)
            self.now += step
            for flow in self.flows:
                flow.left -= step * flow.rate
                for card in flow.cards:
                    self.carried[card] += step * flow.rate
            finished = [flow for flow in self.flows if flow.left <= EPSILON]
            self.flows = [flow for flow in self.flows if flow.left > EPSILON]
            for flow in finished:
                flow.done()
            while self.events and self.events[0][0] <= self.now + EPSILON:
                heapq.heappop(self.events)[2]()
        assert not any(self.todo.values()), "the replay stands still"
        return self.ends

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.number), happen))

    def _flow(self, cards: tuple[Card, ...], seconds: float, is_ring: bool, done: Callable[[], None]) -> None:
        if cards and seconds > 0:
            self.flows.append(Flow(cards, seconds, is_ring, done))
        else:
            self._after(0.0, done)

    def _advance(self, worker: tuple[int, int]) -> None:
        stage, _ = worker
        todo = self.todo[worker]
        while todo and worker not in self.busy:
            action = todo[-1]
            boundary = {Kind.FORWARD: stage - 1, Kind.BACKWARD: stage}.get(action.kind)
            waits = action.kind is Kind.UPDATE or (boundary is not None and 0 <= boundary < len(self.setting.message_s))
            if waits and (*worker, action) not in self.here:
                return
            todo.pop()
            self.here.discard((*worker, action))
            if action.kind is Kind.REDUCE:
                self._reduce(stage, action.index)
            elif action.kind is not Kind.UPDATE:
                times = self.setting.forward_s if action.kind is Kind.FORWARD else self.setting.backward_s
                self.busy.add(worker)
                self._after(times[stage], lambda done=action: self._computed(worker, done))  # type: ignore[misc]

    def _computed(self, worker: tuple[int, int], action: Action) -> None:
        self.busy.discard(worker)
        stage = worker[0]
        other = stage + 1 if action.kind is Kind.FORWARD else stage - 1
        if action.kind is Kind.BACKWARD and stage == 0:
            self.ends.append(self.now)
        if 0 <= other < len(self.setting.replicas):
            receiver = other, action.index % self.setting.replicas[other]
            source, target = self.setting.server(*worker), self.setting.server(*receiver)
            cards = ((source, True), (target, False)) if source != target else ()
            self._flow(cards, self.setting.message_s[min(stage, other)], False, lambda: self._arrived(receiver, action))
        self._advance(worker)

    def _arrived(self, worker: tuple[int, int], action: Action) -> None:
        self.here.add((*worker, action))
        self._advance(worker)

    def _reduce(self, stage: int, group: int) -> None:
        self.joined[stage, group] += 1
        count = self.setting.replicas[stage]
        if self.joined[stage, group] == count:

            def done() -> None:
                for replica in range(count):
                    self._arrived((stage, replica), Action(Kind.UPDATE, group))

            self._flow(self.setting.ring_cards(stage), self.setting.ring_s[stage] if count > 1 else 0.0, True, done)
