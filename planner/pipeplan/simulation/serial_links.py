"""The links of a simulation, each of which carries one job at a time, and the receives that messages wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeplan.simulation.events import Transfer
from pipeplan.simulation.fair_share import SharedNetwork, Use
from pipeplan.simulation.scenario import StageBoundary
from pipeplan_launch.plan.schedule import POSTED_RECEIVES, Action, ActionKind


class LinkJob(NamedTuple):
    """A message or an all-reduce on a link: a flow, which cards may slow, followed by a part that none slows."""

    number: int
    flow_s: float
    """Duration of the flow at full speed."""
    rest_s: float
    """Duration of the second part."""
    use: Use
    """Use of cards by the flow."""
    begun: Callable[[float], None]
    """Called with the start time when the link begins with this job."""
    flown: Callable[[], None]
    """Called at the end of the flow."""
    weight: float = 1.0
    """Its share of a card beside flows of weight 1."""


@dataclass
class SerialLink:
    """A link and the jobs that wait for it."""

    row: str
    pair: str = ""
    free_s: float = 0.0
    waiting: deque[LinkJob] = field(default_factory=deque)
    busy: bool = False


class Carrier:
    """Carries the jobs of links in simulated time, and lists when each link was busy."""

    def __init__(
        self, now: Callable[[], float], at: Callable[[float, Callable[[], None]], None], network: SharedNetwork | None
    ) -> None:
        """`now` returns the simulated time, `at` schedules an event at a time; flows share the cards of a `network`."""
        self._now, self._at, self._network = now, at, network
        self.transfers: list[Transfer] = []

    def carry(self, link: SerialLink, job: LinkJob) -> None:
        """Queue a job on a link. Calls come in order of time, so the link serves jobs in the order of these calls."""
        if self._network is None:
            start = max(self._now(), link.free_s)
            link.free_s = start + job.flow_s + job.rest_s
            self._record(link, job.number, start, link.free_s)
            job.begun(start)
            self._at(start + job.flow_s, job.flown)
            return
        link.waiting.append(job)
        if not link.busy:
            self._begin_next(link, self._network)

    def _begin_next(self, link: SerialLink, network: SharedNetwork) -> None:
        """Begin with the next job that waits for a free link."""
        job, start = link.waiting.popleft(), self._now()
        link.busy = True
        job.begun(start)

        def flown() -> None:
            job.flown()
            self._at(self._now() + job.rest_s, done)

        def done() -> None:
            self._record(link, job.number, start, self._now())
            link.busy = False
            if link.waiting:
                self._begin_next(link, network)

        network.start(job.flow_s, job.use, flown, job.weight, is_message=bool(link.pair))

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


class PostedReceives:
    """The receives of activations of all workers, and the activations that wait until their receive is posted.

    The executor posts the receives of a few minibatches ahead, and a message leaves only when its receive is posted.
    Receives of gradients are posted before the activations leave, so gradients never wait.
    """

    def __init__(self, replicas: Sequence[int]) -> None:
        """`replicas`: the number of replicas of every stage."""
        self._replicas = replicas
        self._taken: dict[tuple[int, int], int] = {}
        """(stage, replica) -> the number of minibatches whose activations it has taken."""
        self._held: dict[tuple[int, int], Callable[[], None]] = {}
        """(stage, minibatch) -> what starts the message whose receive has not been posted."""

    def start(self, stage: int, action: Action, start: Callable[[], None]) -> None:
        """Start the message that an action sends to a stage, at once or when its receive is posted."""
        turn, replica = divmod(action.index, self._replicas[stage])
        if action.kind is ActionKind.FORWARD and turn >= self._taken.get((stage, replica), 0) + POSTED_RECEIVES:
            self._held[stage, action.index] = start
        else:
            start()

    def take(self, stage: int, minibatch: int) -> None:
        """Note that a replica has taken the activations of a minibatch, and posts the next receive."""
        replicas = self._replicas[stage]
        turn, replica = divmod(minibatch, replicas)
        self._taken[stage, replica] = turn + 1
        if (start := self._held.pop((stage, minibatch + POSTED_RECEIVES * replicas), None)) is not None:
            start()
