"""The network cards that each message or all-reduce of a plan crosses, and the share of each card that it uses.

The cards are those of `pipeplan.contention`: every component of every level has a card that joins it to the level
above. Each direction of a card counts as a card of its own here. Shared processor cores are treated in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from pipeplan.links import Links
from pipeplan.plan import Plan
from pipeplan.simulation.flows import Card, Use

OUT, IN, CORES = 0, 1, 2
"""Directions of a card; `CORES` marks the cores of a server."""
MESSAGES, RINGS = 0, 1
"""Indices into the result of `Links.card`."""


@dataclass(frozen=True)
class Cards:
    """The cards of a cluster and their use by the stages of a plan."""

    plan: Plan
    links: Links

    def message(self, sender: int, receiver: int, bandwidth: float) -> Use:
        """Use of cards by a message from one worker to another at `bandwidth` bytes/s."""
        return self._use([(sender, receiver)], bandwidth, MESSAGES)

    def ring(self, stage: int) -> Use:
        """Use of cards by an all-reduce among the replicas of a stage, in a ring in the order of their numbers."""
        return self._rings[stage]

    def computing(self, worker: int) -> Use:
        """Use of its server's cores by a worker that computes; empty where the server has a core for each worker."""
        return self._computing.get(worker, {})

    @cached_property
    def _computing(self) -> dict[int, Use]:
        cluster = self.links.cluster
        return {
            worker: {(CORES, cluster.server_level, cluster.server_of(worker)): 1 / cores}
            for first, stop, cores in cluster.shared_cores
            for worker in range(first, stop)
        }

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
