"""Which workers talk to each other across servers under a plan, busiest first: the teams that a probe measures.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.linkprobe.turns import packed
from pipeplan_launch.placement.levels import Levels
from pipeplan_launch.placement.seats import Seats

MOST_ROUNDS = 20
"""Rounds that a probe measures at most. With the default of two seconds, each then has a tenth of a second."""
MOST_MINIBATCHES = 2_000
"""Minibatches by which the pairs of replicas of two stages are enumerated. Later ones mostly repeat these pairs."""


@dataclass(frozen=True)
class Team:
    """Workers on several servers that exchange messages or reduce gradients together."""

    workers: tuple[int, ...]
    """A pair, the sender first, or all replicas of a stage."""
    stage: int
    """The sender's stage, or the stage of the replicas."""
    is_ring: bool
    """Whether the team reduces gradients; otherwise it is a pair that exchanges messages."""
    share: float
    """Share of the time between two minibatches during which the plan keeps the team's link busy."""

    def planned(self, links: Levels) -> tuple[float, float]:
        """(bytes/s, latency in seconds) that the plan was made for."""
        return (links.ring if self.is_ring else links.message)(self.workers)


def meetings(plan: LaunchPlan, stage: int) -> Iterator[tuple[int, int]]:
    """Pairs of a worker of a stage and a worker of the next stage between which minibatches travel."""
    senders, receivers = plan.pipeline[stage].workers, plan.pipeline[stage + 1].workers
    count = min(math.lcm(len(senders), len(receivers)), MOST_MINIBATCHES)
    return ((senders[number % len(senders)], receivers[number % len(receivers)]) for number in range(count))


def teams(plan: LaunchPlan, seats: Seats) -> list[Team]:
    """The busiest pair of every two servers that exchange messages, and every stage on several servers.

    Sorted by `Team.share`, largest first.
    """
    busiest: dict[frozenset[int], Team] = {}
    rings = []
    for stage, prediction in enumerate(plan.predictions):
        pace = prediction.minibatch_s or math.inf
        if stage + 1 < len(plan.pipeline):
            share = (prediction.boundary_s or 0.0) / pace
            for pair in meetings(plan, stage):
                ends = frozenset(seats.servers[worker] for worker in pair)
                if len(ends) > 1 and (ends not in busiest or busiest[ends].share < share):
                    busiest[ends] = Team(pair, stage, False, share)
        workers = plan.pipeline[stage].workers
        if plan.mode == "training" and len({seats.servers[worker] for worker in workers}) > 1:
            allreduce_s = (prediction.sync_s or 0.0) / (plan.accumulate or len(workers))
            rings.append(Team(workers, stage, True, allreduce_s / pace))
    return sorted([*busiest.values(), *rings], key=lambda team: (-team.share, team.stage, team.workers))


def rounds(plan: LaunchPlan, seats: Seats) -> list[list[Team]]:
    """The teams by rounds. Teams of one round are measured at the same time, as they have no server in common."""

    def servers_of(team: Team) -> set[Hashable]:
        return {seats.servers[worker] for worker in team.workers}

    return packed(teams(plan, seats), servers_of)[:MOST_ROUNDS]
