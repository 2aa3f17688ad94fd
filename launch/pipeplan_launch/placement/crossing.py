"""Who talks to whom between servers under a plan, worst first: what a probe measures. Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.linkprobe.turns import packed
from pipeplan_launch.placement.seats import Seats

MOST_ROUNDS = 20
"""Of a probe: two seconds leave a tenth for each."""
MOST_MINIBATCHES = 2_000
"""By which the meetings of two stages are counted; whatever repeats later does so between the same servers, mostly."""


@dataclass(frozen=True)
class Team:
    """Workers on several servers that exchange messages, or reduce gradients."""

    workers: tuple[int, ...]
    """Two, the sender first; or all replicas of a stage."""
    stage: int
    """That of the sender, or of the replicas."""
    is_ring: bool
    share: float
    """Of the time between two minibatches, that the plan keeps this busy."""


def meetings(plan: LaunchPlan, stage: int) -> Iterator[tuple[int, int]]:
    """Pairs of workers of a stage and of the next between which minibatches go."""
    here, there = plan.pipeline[stage].workers, plan.pipeline[stage + 1].workers
    count = min(math.lcm(len(here), len(there)), MOST_MINIBATCHES)
    return ((here[number % len(here)], there[number % len(there)]) for number in range(count))


def hops(plan: LaunchPlan, stage: int) -> Iterator[tuple[int, int]]:
    """Pairs of replicas that are neighbours in the ring of a stage."""
    workers = plan.pipeline[stage].workers
    return itertools.pairwise((*workers, workers[0])) if len(workers) > 1 else iter(())


def teams(plan: LaunchPlan, seats: Seats) -> list[Team]:
    """One pair for every two servers that exchange messages, and every stage on several; those most busy first."""
    found: dict[frozenset[int], Team] = {}
    rings = []
    for stage, prediction in enumerate(plan.predictions):
        pace = prediction.minibatch_s or math.inf
        if stage + 1 < len(plan.pipeline):
            share = (prediction.boundary_s or 0.0) / pace
            for pair in meetings(plan, stage):
                ends = frozenset(seats.servers[worker] for worker in pair)
                if len(ends) > 1 and (ends not in found or found[ends].share < share):
                    found[ends] = Team(pair, stage, False, share)
        workers = plan.pipeline[stage].workers
        if plan.mode == "training" and len({seats.servers[worker] for worker in workers}) > 1:
            reduces = (prediction.sync_s or 0.0) / (plan.accumulate or len(workers))
            rings.append(Team(workers, stage, True, reduces / pace))
    return sorted([*found.values(), *rings], key=lambda team: (-team.share, team.stage, team.workers))


def rounds(plan: LaunchPlan, seats: Seats) -> list[list[Team]]:
    """What is measured at the same time: teams that have no server in common."""

    def needs(team: Team) -> set[Hashable]:
        return {seats.servers[worker] for worker in team.workers}

    return packed(teams(plan, seats), needs)[:MOST_ROUNDS]
