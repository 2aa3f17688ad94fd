"""Messages and all-reduces as flows that share network cards: max-min fair, as TCP settles at.

A flow alone takes its duration. At full speed it uses a given share of each card that it passes; where a card is asked
for more than all of it, its flows are slowed until they fit. Fair means that no flow could be faster without another
being slower that gets no more of the card they meet at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Card = tuple[int, int, int]
"""Direction, level and number of a component."""
Use = Mapping[Card, float]
"""What share of each card a flow takes at full speed; more than 1 where the card is slower than the flow."""

# A flow with less than this left, in seconds, has arrived: what rounding leaves is none.
EPSILON = 1e-12


@dataclass(eq=False)
class Flow:
    """One of them."""

    left_s: float
    """At full speed."""
    use: Use
    done: Callable[[], None]
    speed: float = 1.0


class Network:
    """The flows that are under way, in simulated time."""

    def __init__(self, now: Callable[[], float], at: Callable[[float, Callable[[], None]], None]) -> None:
        """`now` gives the time, `at` plans an event."""
        self._now, self._at = now, at
        self._flows: list[Flow] = []
        self._since_s = 0.0
        self._plans = 0

    def start(self, duration_s: float, use: Use, done: Callable[[], None]) -> None:
        """Send something off; `done` is called when it has arrived."""
        self._move()
        self._flows.append(Flow(duration_s, {card: share for card, share in use.items() if share > 0}, done))
        self._plan()

    def _move(self) -> None:
        """Bring all flows up to the present."""
        passed, self._since_s = self._now() - self._since_s, self._now()
        for flow in self._flows:
            flow.left_s -= passed * flow.speed

    def _plan(self) -> None:
        """Share the cards anew, and look again when the next flow arrives."""
        share_out(self._flows)
        self._plans += 1
        if self._flows:
            plan = self._plans
            soonest = min(max(flow.left_s, 0.0) / flow.speed for flow in self._flows)
            self._at(self._now() + soonest, lambda: self._arrivals(plan))

    def _arrivals(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._move()
        # Relative to the time, whose rounding may leave more than a fixed amount.
        least = EPSILON * max(1.0, self._now())
        arrived = [flow for flow in self._flows if flow.left_s <= least]
        self._flows = [flow for flow in self._flows if flow.left_s > least]
        self._plan()
        for flow in arrived:
            flow.done()


def share_out(flows: list[Flow]) -> None:
    """Give every flow its max-min fair speed, 1 at most: all rise together until a card is full or a flow is at 1."""
    asked: dict[Card, float] = {}
    for flow in flows:
        flow.speed = 1.0
        for card, share in flow.use.items():
            asked[card] = asked.get(card, 0.0) + share
    if all(total <= 1.0 for total in asked.values()):
        return
    left = dict.fromkeys(asked, 1.0)
    # A flow's level is its share of the card that it uses most.
    rising = [(flow, max(flow.use.values())) for flow in flows if flow.use]
    while rising:
        weights: dict[Card, float] = {}
        for flow, most in rising:
            for card, share in flow.use.items():
                weights[card] = weights.get(card, 0.0) + share / most
        full, level = min(((card, left[card] / weight) for card, weight in weights.items()), key=lambda pair: pair[1])
        level = max(level, EPSILON)
        least = min(most for _, most in rising)
        stopped = (
            [(flow, most) for flow, most in rising if most <= level]
            if least <= level
            else [(flow, most) for flow, most in rising if full in flow.use]
        )
        for flow, most in stopped:
            flow.speed = min(1.0, level / most)
            for card, share in flow.use.items():
                left[card] = max(0.0, left[card] - flow.speed * share)
        gone = {id(flow) for flow, _ in stopped}
        rising = [(flow, most) for flow, most in rising if id(flow) not in gone]
