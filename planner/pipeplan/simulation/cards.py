"""Which network cards a message or an all-reduce of a plan passes, and how much of them it takes at full speed.

The cards are those of `pipeplan.contention`: every component of every level has one to the level above it, and each
direction is a card of its own here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from pipeplan.links import Links
from pipeplan.plan import Plan
from pipeplan.simulation.flows import Card, Use

OUT, IN, CORES = 0, 1, 2
MESSAGES, RINGS = 0, 1


@dataclass(frozen=True)
class Cards:
    """The cards of a cluster, as the stages of a plan use them."""

    plan: Plan
    links: Links

    def message(self, sender: int, receiver: int, bandwidth: float) -> Use:
        """A message from one worker to another, at so many bytes/s."""
        return self._passed([(sender, receiver)], bandwidth, MESSAGES)

    def ring(self, stage: int) -> Use:
        """An all-reduce among the replicas of a stage, in a ring by their numbers, at the planner's rate."""
        return self._rings[stage]

    def computing(self, worker: int) -> Use:
        """What computing takes of the cores of a worker's server, where it has more workers than cores."""
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
        found = []
        for stage in self.plan.stages:
            workers = sorted(stage.workers)
            hops = list(zip(workers, [*workers[1:], workers[0]], strict=True))
            found.append(self._passed(hops, self.links.allreduce_among(workers)[0], RINGS))
        return tuple(found)

    def _passed(self, hops: list[tuple[int, int]], bandwidth: float, kind: int) -> Use:
        """The cards on the way from each worker to the next, all hops at once."""
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
