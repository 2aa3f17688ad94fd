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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pipeplan.cluster_data.links import Links
from pipeplan.plan.plan import Plan

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
(docs/report.md)."""
EPSILON = 1e-12
"""A flow with fewer seconds left has arrived: the remainder is rounding."""
MOST_REMEMBERED = 10_000
"""The most combinations of flows whose speeds are remembered; a schedule comes back to the same ones often."""


@dataclass(eq=False)
class NetworkFlow:
    """A transfer under way."""

    left_s: float
    """Time that it still takes at full speed."""
    use: Use
    done: Callable[[], None]
    """Called when it has arrived."""
    weight: float = 1.0
    """Its share of a card beside flows of weight 1."""
    is_message: bool = False
    """Whether it is a message, whose weight depends on the messages that began before it."""
    speed: float = 1.0
    """Current speed, as a share of full speed."""
    kind: int = 0
    """A number that it shares with the flows that have its use of cards, its weight and its kind of content."""


class SharedNetwork:
    """The flows that are under way, in simulated time."""

    def __init__(self, now: Callable[[], float], at: Callable[[float, Callable[[], None]], None]) -> None:
        """`now` returns the simulated time, `at` schedules an event at a time."""
        self._now, self._at = now, at
        self._flows: list[NetworkFlow] = []
        self._since_s = 0.0
        self._plans = 0
        self._kinds: dict[tuple[object, ...], tuple[int, Use]] = {}
        self._speeds: dict[tuple[int, ...], list[float]] = {}
        """The speeds of flows, by their kinds in the order of their starts."""

    def start(
        self, duration_s: float, use: Use, done: Callable[[], None], weight: float = 1.0, *, is_message: bool = False
    ) -> None:
        """Start a flow that takes `duration_s` at full speed; `done` is called when it has arrived."""
        self._move()
        key = *use.items(), weight, is_message
        if key not in self._kinds:
            self._kinds[key] = len(self._kinds), {card: share for card, share in use.items() if share > 0}
        kind, shares = self._kinds[key]
        self._flows.append(NetworkFlow(duration_s, shares, done, weight, is_message, kind=kind))
        self._plan()

    def _move(self) -> None:
        """Account for the progress of all flows since the last call."""
        passed, self._since_s = self._now() - self._since_s, self._now()
        for flow in self._flows:
            flow.left_s -= passed * flow.speed

    def _plan(self) -> None:
        """Compute the speeds of all flows, and schedule the next arrival."""
        self._share_cards()
        self._plans += 1
        if self._flows:
            plan = self._plans
            soonest = min(max(flow.left_s, 0.0) / flow.speed for flow in self._flows)
            self._at(self._now() + soonest, lambda: self._arrivals(plan))

    def _share_cards(self) -> None:
        """Set the speeds of all flows: those of the last time when the same flows were under way, if there was one."""
        kinds = tuple([flow.kind for flow in self._flows])
        known = self._speeds.get(kinds)
        if known is not None:
            for flow, speed in zip(self._flows, known, strict=True):
                flow.speed = speed
            return
        share_cards(self._flows)
        if len(self._speeds) >= MOST_REMEMBERED:
            self._speeds.clear()
        self._speeds[kinds] = [flow.speed for flow in self._flows]

    def _arrivals(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._move()
        # The rounding error grows with the simulated time.
        least = EPSILON * max(1.0, self._now())
        arrived = [flow for flow in self._flows if flow.left_s <= least]
        self._flows = [flow for flow in self._flows if flow.left_s > least]
        self._plan()
        for flow in arrived:
            flow.done()


_Rising = tuple[NetworkFlow, float, list[tuple[Card, float]]]
"""(flow, level at which it has full speed, its shares of the cards that are too slow for all of their flows)."""


def share_cards(flows: list[NetworkFlow]) -> None:
    """Set the weighted max-min fair speed, at most 1, of every flow.

    Progressive filling: the levels of all flows rise together until a card is full or a flow reaches full speed; these
    flows stop, and the others go on rising. The level of a flow is its share of the card that it uses the most, over
    its weight.
    """
    demand: dict[Card, float] = {}
    users: dict[Card, int] = {}
    for flow in flows:
        flow.speed = 1.0
        for card, share in flow.use.items():
            demand[card] = demand.get(card, 0.0) + share
            users[card] = users.get(card, 0) + 1
    # No other card limits a flow.
    left = {card: 1.0 for card, total in demand.items() if total > 1.0 and not _has_cores(card, users[card])}
    if not left:
        return
    rising: list[_Rising] = []
    for flow, weight in _weights(flows):
        if crowded := [(card, share) for card, share in flow.use.items() if card in left]:
            rising.append((flow, max(flow.use.values()) / weight, crowded))
    while rising:
        weights: dict[Card, float] = {}
        for _, most, crowded in rising:
            for card, share in crowded:
                weights[card] = weights.get(card, 0.0) + share / most
        full, level = min(((card, left[card] / weight) for card, weight in weights.items()), key=lambda pair: pair[1])
        level = max(level, EPSILON)
        slowed = min(most for _, most, _ in rising) > level
        rest = []
        for flow, most, crowded in rising:
            if full not in flow.use if slowed else most > level:
                rest.append((flow, most, crowded))
                continue
            flow.speed = min(1.0, level / most)
            for card, share in crowded:
                left[card] = max(0.0, left[card] - flow.speed * share)
        rising = rest


def _has_cores(card: Card, workers: int) -> bool:
    """Whether each of so many computing workers has one of these cores."""
    return card[0] == CORES and workers <= card[3]


def _weights(flows: list[NetworkFlow]) -> Iterator[tuple[NetworkFlow, float]]:
    """The weight of every flow; messages, in the order of their starts, have less the later they began.

    The order is that on the card which the most messages share.
    """
    count: dict[Card, int] = {}
    places: list[dict[Card, int]] = []
    for flow in flows:
        places.append({card: count.get(card, 0) for card in flow.use if flow.is_message})
        for card in places[-1]:
            count[card] = count.get(card, 0) + 1
    for flow, place in zip(flows, places, strict=True):
        if not place:
            yield flow, flow.weight
            continue
        members, older = max((count[card], older) for card, older in place.items())
        yield flow, members * YOUNGER**older * (1 - YOUNGER) / (1 - YOUNGER**members)


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
