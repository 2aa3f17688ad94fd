"""Messages and all-reduces as flows that share network cards by weighted max-min fairness.

The cards are those of `pipeplan.cost.contention`: every component of every level has a card that joins it to the level
above. Here each direction of a card counts as a separate card. Shared processor cores are treated in the same way.

A flow that is alone runs at full speed. It then uses a given share of each card that it crosses. If the shares of a
card add up to more than 1, the card slows its flows down until they fit. The result is max-min fair: a flow could only
be faster if another flow on a common card became slower, and that flow has at most the same share per weight there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from operator import truediv
from typing import Any

from pipeplan.cluster_data.links import Links
from pipeplan.plan.plan import Plan
from pipeplan.simulation.events import FIRST, EventQueue


@dataclass(eq=False, slots=True)
class Card:
    """One direction of a network card, or the cores of a server."""

    workers: int = 0
    """For a server's cores, the number of workers that may compute at full speed together, even if their shares add up
    to more than 1; 0 for a network card."""


Use = Mapping[Card, float]
"""The share of each card that a flow uses at full speed; above 1 if the card is slower than the flow."""

RING_WEIGHT = 4.5
"""Weight of an all-reduce on a card, if a message has weight 1. TCP connections share a link equally only after a
while. Connections of an all-reduce carry data nearly all the time. Connections of messages start slowly each time."""
YOUNGER = 0.9
"""Weight of a message on a card, relative to the message that began before it, because connections start slowly. The
weights of all messages on a card are scaled so that their sum is the number of messages. `RING_WEIGHT` and `YOUNGER`
were fitted to replays (docs/report.md)."""
EPSILON = 1e-12
"""Remaining seconds below which a flow counts as arrived, because of rounding errors."""
MOST_REMEMBERED = 10_000
"""Largest number of combinations of flows whose speeds are cached. A schedule often repeats the same combinations."""


@dataclass(frozen=True)
class FlowKind:
    """The properties of a flow that determine its speed among other flows."""

    shares: tuple[tuple[Card, float], ...]
    """The share of each card that the flow uses at full speed."""
    most: float
    """The flow's share of the card that it uses the most."""
    weight: float = 1.0
    """The flow's weight on a card, relative to flows of weight 1."""
    meets: tuple[Card, ...] = ()
    """For a message, the cards on which its weight depends on the messages that began before it."""


def flow_kind(use: Use, weight: float = 1.0, *, is_message: bool = False) -> FlowKind:
    """The kind of a flow with this use of cards."""
    shares = tuple((card, share) for card, share in use.items() if share > 0)
    cards = tuple(card for card, _ in shares) if is_message else ()
    return FlowKind(shares, max((share for _, share in shares), default=0.0), weight, cards)


def reduced_kinds(kinds: Sequence[FlowKind]) -> list[FlowKind]:
    """The kinds without the cards that affect no speed, if there is at most one flow of each kind at a time.

    A card slows no flow if it cannot be full, or if another card that all its flows cross is always full earlier. The
    same holds for cards that only affect the weights of messages. So kinds that differ at first often become equal.
    """
    crossing: dict[Card, dict[int, float]] = defaultdict(dict)
    meeting: dict[Card, dict[int, float]] = defaultdict(dict)
    for number, kind in enumerate(kinds):
        for card, share in kind.shares:
            crossing[card][number] = share
        for card in kind.meets:
            meeting[card][number] = 1.0
    slow = _undominated({card: flows for card, flows in crossing.items() if sum(flows.values()) > 1.0}, kinds)
    met = _undominated({card: flows for card, flows in meeting.items() if len(flows) > 1}, kinds)
    return [
        replace(
            kind,
            shares=tuple(pair for pair in kind.shares if pair[0] in slow),
            meets=tuple(card for card in kind.meets if card in met),
        )
        for kind in kinds
    ]


def _undominated(crossing: dict[Card, dict[int, float]], kinds: Sequence[FlowKind]) -> dict[Card, dict[int, float]]:
    """The cards except dominated ones. A card is dominated if all its flows cross another remaining card, each with at
    least the same share."""
    left = dict(crossing)
    for card, flows in crossing.items():
        for other, _ in kinds[next(iter(flows))].shares:
            beside = left.get(other)
            if other is not card and beside and all(beside.get(flow, 0.0) >= share for flow, share in flows.items()):
                del left[card]
                break
    return left


class SharedNetwork:
    """The flows that are under way in simulated time, as parallel lists in the order in which the flows started.

    If several flows start or arrive at the same time, the speeds are changed once, before the time advances.
    """

    def __init__(self, queue: EventQueue, kinds: Sequence[FlowKind]) -> None:
        """Prepare an empty network.

        `kinds` has the kinds of all flows. There is at most one flow of each kind at a time, and a flow refers to its
        kind by index."""
        self._queue = queue
        self._kinds = reduced_kinds(kinds)
        self._uses_none = [not kind.shares for kind in kinds]
        first: dict[FlowKind, int] = {}
        self._equal = [first.setdefault(kind, number) for number, kind in enumerate(self._kinds)]
        """For each kind, the index of the first equal kind."""
        self._numbers: list[int] = []
        """For each flow, the index of its kind."""
        self._left: list[float] = []
        """Seconds that each flow still takes at full speed."""
        self._speeds: list[float] = []
        """Speed of each flow since the last change of speeds, as a share of full speed."""
        self._done: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """The function and arguments to call when each flow has arrived."""
        self._since_s = 0.0
        """The time to which `_left` refers."""
        self._plans = 0
        """Number of changes of speeds so far. Only the arrival scheduled at the last change is valid."""
        self._remembered: dict[tuple[int, ...], list[float]] = {}
        """Cached speeds of combinations of flows, by their kinds."""

    def start(self, duration_s: float, kind: int, done: Callable[..., None], *args: Any) -> None:
        """Start a flow that takes `duration_s` at full speed; `done(*args)` is called when it has arrived."""
        if self._uses_none[kind]:
            self._queue.at(self._queue.now + duration_s, FIRST, done, *args)
            return
        self._move()
        self._numbers.append(self._equal[kind])
        self._left.append(duration_s)
        self._done.append((done, args))
        self._queue.settle = self._plan

    def _move(self) -> None:
        """Subtract the progress of all flows since the last call."""
        passed, self._since_s = self._queue.now - self._since_s, self._queue.now
        if passed > 0:
            self._left = [left - passed * speed for left, speed in zip(self._left, self._speeds, strict=True)]

    def _plan(self) -> None:
        """Set the speeds of all flows, and schedule the next arrival."""
        numbers = tuple(self._numbers)
        speeds = self._remembered.get(numbers)
        if speeds is None:
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.clear()
            speeds = self._remembered[numbers] = share_cards([self._kinds[number] for number in numbers])
        self._speeds = speeds
        self._plans += 1
        if speeds:
            soonest_s = max(0.0, min(map(truediv, self._left, speeds)))
            self._queue.at(self._queue.now + soonest_s, FIRST, self._arrivals, self._plans)

    def _arrivals(self, plan: int) -> None:
        if plan != self._plans:  # flows have started since
            return
        self._move()
        # The rounding error grows with the simulated time.
        least = EPSILON * max(1.0, self._queue.now)
        arrived = [flow for flow, left in enumerate(self._left) if left <= least]
        done = [self._done[flow] for flow in arrived]
        for flow in reversed(arrived):
            del self._numbers[flow], self._left[flow], self._done[flow]
        self._queue.settle = self._plan
        for event, args in done:
            event(*args)


_User = tuple[int, float, float, float]
"""A flow on a card: (index, level at which it has full speed, share of the card, share / level)."""


def share_cards(flows: Sequence[FlowKind]) -> list[float]:
    """The weighted max-min fair speed, at most 1, of every flow.

    This is progressive filling. The levels of all flows rise together until a card is full or a flow reaches full
    speed. The affected flows stop, and the others go on rising. The level of a flow is its share of the card that it
    uses the most, divided by its weight.
    """
    speeds = [1.0] * len(flows)
    crowded = _crowded(flows)
    rising = {flow: most for users in crowded for flow, most, _, _ in users}
    while rising:
        level, full = math.inf, crowded[0]
        for users in crowded:
            left, weight = 1.0, 0.0
            for flow, _, share, part in users:
                if flow in rising:
                    weight += part
                else:
                    left -= speeds[flow] * share
            if weight > 0 and left < level * weight:
                level, full = left / weight, users
        level = max(level, EPSILON)
        if at_full_speed := [flow for flow, most in rising.items() if most <= level]:
            for flow in at_full_speed:
                del rising[flow]
            continue
        for flow, most, _, _ in full:
            if flow in rising:
                speeds[flow] = level / most
                del rising[flow]
    return speeds


def _crowded(flows: Sequence[FlowKind]) -> list[list[_User]]:
    """The flows on each card that is too slow for all of its flows. No other card limits a flow.

    The later a message began, the smaller its weight. The weight comes from the card that the most messages share.
    """
    demand: dict[Card, float] = {}
    messages: dict[Card, int] = {}
    for kind in flows:
        for card, share in kind.shares:
            demand[card] = demand.get(card, 0.0) + share
        for card in kind.meets:
            messages[card] = messages.get(card, 0) + 1
    crowded: dict[Card, list[_User]] = {
        card: [] for card, total in demand.items() if total > 1.0 and not (card.workers and _has_cores(card, flows))
    }
    begun = dict.fromkeys(messages, 0)
    for flow, kind in enumerate(flows if crowded else ()):
        members = older = 0
        for card in kind.meets:
            count, before = messages[card], begun[card]
            begun[card] = before + 1
            if count > members or (count == members and before > older):
                members, older = count, before
        most = kind.most / (_weight(members, older) if members > 1 else kind.weight)
        for card, share in kind.shares:
            if card in crowded:
                crowded[card].append((flow, most, share, share / most))
    return list(crowded.values())


def _has_cores(card: Card, flows: Sequence[FlowKind]) -> bool:
    """Whether each computing worker has its own core."""
    return sum(card is used for flow in flows for used, _ in flow.shares) <= card.workers


@cache
def _weight(members: int, older: int) -> float:
    """The weight of one of `members` messages on a card, of which `older` began before it."""
    return members * YOUNGER**older * (1 - YOUNGER) / (1 - YOUNGER**members)


OUT, IN = 0, 1
"""Directions of a card."""
MESSAGES, RINGS = 0, 1
"""Indices into the result of `Links.card`."""


@dataclass(frozen=True)
class SharedCards:
    """The cards of a cluster and their use by the stages of a plan."""

    plan: Plan
    links: Links
    busy: int = 1
    """Number of busy workers on a server when the layers were measured. Up to this number, workers compute at full
    speed, because the measured times include their mutual slowdown. More workers share the server's cores."""
    _cards: dict[tuple[int, int, int], Card] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The cards created so far, by direction, level and index of the component."""

    def message(self, sender: int, receiver: int, bandwidth: float) -> Use:
        """Use of cards by a message from one worker to another at `bandwidth` bytes/s."""
        return self._use([(sender, receiver)], bandwidth, MESSAGES)

    def ring(self, stage: int) -> Use:
        """Use of cards by an all-reduce among the replicas of a stage, in a ring in the order of the workers'
        indices."""
        workers = sorted(self.plan.stages[stage].workers)
        hops = list(zip(workers, [*workers[1:], workers[0]], strict=True))
        return self._use(hops, self.links.allreduce_among(workers)[0], RINGS)

    def computing(self, worker: int) -> Use:
        """Use of its server's cores by a worker that computes; empty if the server has a core for each worker."""
        return self._computing.get(worker, {})

    @cached_property
    def _computing(self) -> dict[int, Use]:
        cluster = self.links.cluster
        uses: dict[int, Use] = {}
        for first, stop, cores in cluster.shared_cores:
            use: Use = {Card(min(self.busy, math.ceil(cores))): 1 / cores}
            uses |= dict.fromkeys(range(first, stop), use)
        return uses

    def _use(self, hops: list[tuple[int, int]], bandwidth: float, kind: int) -> Use:
        """Use of cards by simultaneous transfers at `bandwidth` bytes/s over all hops (sender, receiver)."""
        use: dict[Card, float] = {}
        cluster = self.links.cluster
        for sender, receiver in hops:
            for level in range(cluster.level_between(min(sender, receiver), max(sender, receiver))):
                for direction, worker in ((OUT, sender), (IN, receiver)):
                    rate = self.links.card(level, worker)[kind]
                    if math.isfinite(rate) and rate > 0:
                        place = direction, level, cluster.component(level, worker)
                        card = self._cards.setdefault(place, Card())
                        use[card] = use.get(card, 0.0) + bandwidth / rate
        return use
