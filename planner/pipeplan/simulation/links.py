"""The links of a simulation, each of which carries one message or all-reduce at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeplan.simulation.events import FIRST, EventQueue, Transfer
from pipeplan.simulation.fair_share import SharedNetwork

Flown = Callable[[], None]
"""Called at the end of a flow."""
Begun = Callable[[float], None] | None
"""Called with the start time when the link begins with a job."""


@dataclass(eq=False, slots=True)
class SerialLink:
    """A link and the jobs that wait for it."""

    row: str
    pair: str = ""
    waiting: deque[tuple[Route, int, Flown, Begun]] = field(default_factory=deque)
    busy: bool = False


@dataclass(eq=False, slots=True)
class Route:
    """What all messages between two workers have in common, or all all-reduces of a stage.

    Each is a flow, which cards may slow, followed by a part that none slows.
    """

    link: SerialLink
    flow_s: float
    """Duration of the flow at full speed."""
    rest_s: float
    """Duration of the second part."""
    kind: int
    """The kind of its flow, as a place in the kinds of the `SharedNetwork`."""
    latency_s: float = 0.0
    """Time from the end of a message's flow to its arrival, in which the link is free."""


class Carrier:
    """Carries the jobs of links in simulated time, and lists when each link was busy."""

    def __init__(self, queue: EventQueue, network: SharedNetwork) -> None:
        """Flows share the cards of the network."""
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
