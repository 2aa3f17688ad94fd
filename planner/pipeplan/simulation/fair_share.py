"""Messages and all-reduces as flows that share network cards by weighted max-min fairness.

The cards are those of `pipeplan.cost.contention`: every component of every level has a card that joins it to the level
above. Each direction of a card counts as a card of its own here. Shared processor cores are treated in the same way.

A flow that is alone takes its stated duration. At full speed it uses a given share of each card that it crosses. Where
the shares of a card add up to more than 1, its flows are slowed down until they fit. The result is max-min fair: no
flow could be faster without slowing down another flow that gets no larger share of a card that both cross, where the
share of a flow is divided by its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import truediv
from typing import Any, NamedTuple

from pipeplan.cluster_data.links import Links
from pipeplan.plan.plan import Plan
from pipeplan.simulation.events import EventQueue

Card = tuple[int, ...]
"""(direction, level, index of the component), and for the cores of a server the number of workers that all have a core
of their own."""
Use = Mapping[Card, float]
"""The share of each card that a flow uses at full speed; more than 1 where the card is slower than the flow."""

RING_WEIGHT = 4.5
"""Share of a card that an all-reduce gets, where a message beside it gets 1. TCP connections share a link equally only
after a while: those of an all-reduce carry data nearly all the time, those of a message begin slowly each time."""
YOUNGER = 0.9
"""Share of a card that a message gets, where the one that began before it gets 1; for the same reason. All messages on
a card together have as much of it, beside an all-reduce, as if they were equal. Both numbers fit replays
(docs/simulate.md)."""
EPSILON = 1e-12
"""A flow with fewer seconds left has arrived: the remainder is rounding."""
MOST_REMEMBERED = 10_000
"""The most combinations of flows whose speeds are remembered; a schedule comes back to the same ones often."""


class FlowKind(NamedTuple):
    """The properties of a flow that decide its speed beside other flows."""

    shares: tuple[tuple[Card, float], ...]
    """The share of each card that it uses at full speed, without cards that it does not use."""
    weight: float = 1.0
    """Its share of a card beside flows of weight 1."""
    is_message: bool = False
    """Whether it is a message, whose weight depends on the messages that began before it."""


class SharedNetwork:
    """The flows that are under way, in simulated time: parallel lists, in the order in which the flows started.

    Flows that start or arrive at the same time change the speeds once, before the time goes on (`plan`).
    """

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._kinds: list[FlowKind] = []
        """Every kind of flow so far; flows name theirs by its place."""
        self._numbers: list[int] = []
        """The kind of each flow."""
        self._left: list[float] = []
        """Seconds that each flow still takes at full speed."""
        self._speeds: list[float] = []
        """Speed of each flow, as a share of full speed; out of date while `is_changed`."""
        self._done: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What to call when each flow has arrived."""
        self._since_s = 0.0
        """The time of `_left`."""
        self._next_s = math.inf
        """Time of the next arrival."""
        self._place = 0
        """Place of the next arrival among the events of its time."""
        self.is_changed = False
        """Whether flows have started or arrived since the last plan."""
        self._remembered: dict[tuple[int, ...], list[float]] = {}
        """The speeds of flows, by their kinds."""

    def kind(self, use: Use, weight: float = 1.0, *, is_message: bool = False) -> int:
        """The number of a kind of flow."""
        found = FlowKind(tuple((card, share) for card, share in use.items() if share > 0), weight, is_message)
        if found not in self._kinds:
            self._kinds.append(found)
        return self._kinds.index(found)

    def start(self, duration_s: float, kind: int, done: Callable[..., None], *args: Any) -> None:
        """Start a flow that takes `duration_s` at full speed; `done(*args)` is called when it has arrived."""
        self._move()
        self._numbers.append(kind)
        self._left.append(duration_s)
        self._done.append((done, args))
        self.is_changed, self._place = True, self._queue.next_place()
        # Another flow arrives now, or this one does: before events of the same time that come later.
        if duration_s <= 0 or self._next_s <= self._queue.now:
            self.plan()

    def _move(self) -> None:
        """Account for the progress of all flows since the last call."""
        passed, self._since_s = self._queue.now - self._since_s, self._queue.now
        if passed > 0:
            self._left = [left - passed * speed for left, speed in zip(self._left, self._speeds, strict=True)]

    def plan(self) -> None:
        """Set the speeds of all flows, and schedule the next arrival."""
        self.is_changed = False
        numbers = tuple(self._numbers)
        speeds = self._remembered.get(numbers)
        if speeds is None:
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.clear()
            speeds = self._remembered[numbers] = share_cards([self._kinds[number] for number in numbers])
        self._speeds = speeds
        self._next_s = math.inf
        if speeds:
            self._next_s = self._queue.now + max(0.0, min(map(truediv, self._left, speeds)))
            self._queue.put(self._next_s, -1, self._place, self._arrivals, self._place)

    def _arrivals(self, place: int) -> None:
        if place != self._place:  # flows have started since this was planned
            return
        self._move()
        # The rounding error grows with the simulated time.
        least = EPSILON * max(1.0, self._queue.now)
        flows = list(zip(self._numbers, self._left, self._done, strict=True))
        rest = [flow for flow in flows if flow[1] > least]
        self._numbers, self._left, self._done = ([flow[part] for flow in rest] for part in range(3))
        self.is_changed, self._place, self._next_s = True, self._queue.next_place(), math.inf
        for _, left, (done, args) in flows:
            if left <= least:
                done(*args)


_Rising = tuple[int, float, list[tuple[Card, float, float]]]
"""(flow, level at which it has full speed, (card, share, share / level) of the cards that are too slow for all of
their flows)."""


def share_cards(flows: Sequence[FlowKind]) -> list[float]:
    """The weighted max-min fair speed, at most 1, of every flow.

    Progressive filling: the levels of all flows rise together until a card is full or a flow reaches full speed; these
    flows stop, and the others go on rising. The level of a flow is its share of the card that it uses the most, over
    its weight.
    """
    speeds = [1.0] * len(flows)
    demand: dict[Card, float] = {}
    for flow in flows:
        for card, share in flow.shares:
            demand[card] = demand.get(card, 0.0) + share
    # No other card limits a flow.
    left = {card: 1.0 for card, total in demand.items() if total > 1.0 and not _has_cores(card, flows)}
    rising = _rising(flows, left) if left else []
    while rising:
        weights: dict[Card, float] = {}
        for _, _, crowded in rising:
            for card, _, weight in crowded:
                weights[card] = weights.get(card, 0.0) + weight
        level, full = math.inf, None
        for card, weight in weights.items():
            if left[card] / weight < level:
                level, full = left[card] / weight, card
        level = max(level, EPSILON)
        slowed = min(most for _, most, _ in rising) > level
        rest = []
        for one in rising:
            flow_number, most, crowded = one
            if all(card != full for card, _, _ in crowded) if slowed else most > level:
                rest.append(one)
                continue
            speed = speeds[flow_number] = min(1.0, level / most)
            for card, share, _ in crowded:
                left[card] = max(0.0, left[card] - speed * share)
        rising = rest
    return speeds


def _has_cores(card: Card, flows: Sequence[FlowKind]) -> bool:
    """Whether each of the computing workers has one of these cores."""
    return card[0] == CORES and sum(card == used for flow in flows for used, _ in flow.shares) <= card[3]


def _rising(flows: Sequence[FlowKind], crowded: Mapping[Card, float]) -> list[_Rising]:
    """The flows that cross crowded cards.

    Messages, in the order of their starts, have less weight the later they began. The order is that on the card which
    the most messages share.
    """
    count: dict[Card, int] = {}
    places: list[list[tuple[Card, int]]] = []
    for flow in flows:
        places.append([])
        if flow.is_message:
            for card, _ in flow.shares:
                older = count.get(card, 0)
                places[-1].append((card, older))
                count[card] = older + 1
    rising = []
    for number, (flow, place) in enumerate(zip(flows, places, strict=True)):
        mine = [(card, share) for card, share in flow.shares if card in crowded]
        if mine:
            weight = flow.weight
            if place:
                members, older = max((count[card], older) for card, older in place)
                weight = members * YOUNGER**older * (1 - YOUNGER) / (1 - YOUNGER**members)
            most = max(share for _, share in flow.shares) / weight
            rising.append((number, most, [(card, share, share / most) for card, share in mine]))
    return rising


OUT, IN, CORES = 0, 1, 2
"""Directions of a card; `CORES` marks the cores of a server."""
MESSAGES, RINGS = 0, 1
"""Indices into the result of `Links.card`."""


@dataclass(frozen=True)
class SharedCards:
    """The cards of a cluster and their use by the stages of a plan."""

    plan: Plan
    links: Links
    busy: int = 1
    """Busy workers of a server beside which the layers were measured. So many or fewer compute at full speed: what they
    take from each other is in their times. More of them have the cores of the server, some of which may be idle at
    times."""
    _messages: dict[tuple[int, int, float], Use] = field(default_factory=dict, init=False, repr=False, compare=False)

    def message(self, sender: int, receiver: int, bandwidth: float) -> Use:
        """Use of cards by a message from one worker to another at `bandwidth` bytes/s."""
        key = sender, receiver, bandwidth
        if key not in self._messages:
            self._messages[key] = self._use([(sender, receiver)], bandwidth, MESSAGES)
        return self._messages[key]

    def ring(self, stage: int) -> Use:
        """Use of cards by an all-reduce among the replicas of a stage, in a ring in the order of their numbers."""
        return self._rings[stage]

    def computing(self, worker: int) -> Use:
        """Use of its server's cores by a worker that computes; empty where the server has a core for each worker."""
        return self._computing.get(worker, {})

    @cached_property
    def _computing(self) -> dict[int, Use]:
        cluster = self.links.cluster
        uses: dict[int, Use] = {}
        for first, stop, cores in cluster.shared_cores:
            own = min(self.busy, math.ceil(cores))
            use: Use = {(CORES, cluster.server_level, cluster.server_of(first), own): 1 / cores}
            uses |= dict.fromkeys(range(first, stop), use)
        return uses

    @cached_property
    def _rings(self) -> tuple[Use, ...]:
        rings = []
        for stage in self.plan.stages:
            workers = sorted(stage.workers)
            hops = list(zip(workers, [*workers[1:], workers[0]], strict=True))
            rings.append(self._use(hops, self.links.allreduce_among(workers)[0], RINGS))
        return tuple(rings)

    def _use(self, hops: list[tuple[int, int]], bandwidth: float, kind: int) -> Use:
        """Use of cards by simultaneous transfers at `bandwidth` bytes/s over all hops (sender, receiver)."""
        use: dict[Card, float] = {}
        cluster = self.links.cluster
        for sender, receiver in hops:
            for level in range(cluster.level_between(min(sender, receiver), max(sender, receiver))):
                for direction, worker in ((OUT, sender), (IN, receiver)):
                    rate = self.links.card(level, worker)[kind]
                    if math.isfinite(rate) and rate > 0:
                        card = direction, level, cluster.component(level, worker)
                        use[card] = use.get(card, 0.0) + bandwidth / rate
        return use
