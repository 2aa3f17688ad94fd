"""The links of a simulation, each of which carries one message or all-reduce at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeplan.simulation.events import EventQueue, Transfer
from pipeplan.simulation.fair_share import SharedNetwork
from pipeplan.simulation.scenario import StageBoundary


@dataclass(eq=False, slots=True)
class SerialLink:
    """A link and the jobs that wait for it."""

    row: str
    pair: str = ""
    free_s: float = 0.0
    waiting: deque[tuple[Route, int, Any]] = field(default_factory=deque)
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
    flow_kind: int
    """The kind of its flow (`SharedNetwork.kind`)."""
    begun: Callable[[float, Any], None] | None
    """Called with the start time and the content when the link begins with a job."""
    flown: Callable[[Any], None]
    """Called with the content at the end of the flow."""


class Carrier:
    """Carries the jobs of links in simulated time, and lists when each link was busy."""

    def __init__(self, queue: EventQueue, network: SharedNetwork | None) -> None:
        """Flows share the cards of a `network`."""
        self._queue, self._network = queue, network
        self.transfers: list[Transfer] = []

    def carry(self, route: Route, number: int, content: Any) -> None:
        """Queue a job on the link of its route, with the number of its minibatch or group.

        Calls come in order of time, so a link serves jobs in the order of these calls.
        """
        link = route.link
        if self._network is not None:
            if link.busy:
                link.waiting.append((route, number, content))
            else:
                self._begin(self._network, route, number, content)
            return
        start_s = max(self._queue.now, link.free_s)
        link.free_s = start_s + route.flow_s + route.rest_s
        self._record(link, number, start_s, link.free_s)
        if route.begun is not None:
            route.begun(start_s, content)
        self._queue.at(start_s + route.flow_s, -1, route.flown, content)

    def _begin(self, network: SharedNetwork, route: Route, number: int, content: Any) -> None:
        """Begin with a job on a free link."""
        start_s, route.link.busy = self._queue.now, True
        if route.begun is not None:
            route.begun(start_s, content)
        network.start(route.flow_s, route.flow_kind, self._flown, route, number, content, start_s)

    def _flown(self, route: Route, number: int, content: Any, start_s: float) -> None:
        route.flown(content)
        if route.rest_s > 0:
            self._queue.at(self._queue.now + route.rest_s, -1, self._done, route.link, number, start_s)
        else:
            self._done(route.link, number, start_s)

    def _done(self, link: SerialLink, number: int, start_s: float) -> None:
        self._record(link, number, start_s, self._queue.now)
        link.busy = False
        if link.waiting and self._network is not None:
            self._begin(self._network, *link.waiting.popleft())

    def _record(self, link: SerialLink, number: int, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.transfers.append(Transfer(link.row, number, start_s, end_s, link.pair))


def boundary_links(name: str, hops: Sequence[StageBoundary]) -> list[list[SerialLink]]:
    """The links of a boundary in one direction, for every copy of the pipeline."""
    links = []
    for copy, hop in enumerate(hops, start=1):
        copy_name = name if len(hops) == 1 else f"{name}, copy {copy}"
        rows = (copy_name if hop.links == 1 else f"{copy_name}, link {link + 1}" for link in range(hop.links))
        links.append([SerialLink(row) for row in rows])
    return links
