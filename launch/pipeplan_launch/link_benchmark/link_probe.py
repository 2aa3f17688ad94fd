"""Measures the rates that messages and all-reduces between servers reach, for about two seconds before training.

The teams that a probe measures are the workers that a plan makes communicate across servers, busiest first. All workers
go through the same rounds, whether or not they take part in one. The time limit is for all rounds together: when it is
used up, the remaining rounds, which carry the least traffic, are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from pipeplan_launch.comm.p2p import Transport, peer_loss_explained
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.elastic.process_groups import Groups
from pipeplan_launch.link_benchmark.config import KIB, MIB
from pipeplan_launch.link_benchmark.pair_schedule import pack_rounds
from pipeplan_launch.link_benchmark.traffic import (
    AllReduce,
    Operation,
    TimeLimits,
    TransportExchange,
    agree_over,
    time_over_sizes,
)
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.planned_links import PlannedLinks
from pipeplan_launch.rank_mapping.rank_assignment import RankAssignment

MOST_ROUNDS = 20
"""Rounds that a probe measures at most. With the default of two seconds, each then has a tenth of a second."""
MOST_MINIBATCHES = 2_000
"""Minibatches by which the pairs of replicas of two stages are enumerated. Later ones mostly repeat these pairs."""
PROBE_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
ENOUGH_S = 0.05
"""A size whose operation takes longer than this is the last one of its round."""
LEAST_S = 0.02
"""A round does not begin if less time than this remains."""


@dataclass(frozen=True)
class CommunicatingTeam:
    """Workers on several servers that exchange messages or reduce gradients together."""

    workers: tuple[int, ...]
    """A pair, the sender first, or all replicas of a stage."""
    stage: int
    """The sender's stage, or the stage of the replicas."""
    is_ring: bool
    """Whether the team reduces gradients; otherwise it is a pair that exchanges messages."""
    share: float
    """Share of the time between two minibatches during which the plan keeps the team's link busy."""

    def planned(self, links: PlannedLinks) -> tuple[float, float]:
        """(bytes/s, latency in seconds) that the plan was made for."""
        return (links.ring if self.is_ring else links.message)(self.workers)


@dataclass(frozen=True)
class ProbeTask:
    """The measurements of a probe. Worker 0 sends it to all workers."""

    rounds: Sequence[Sequence[CommunicatingTeam]]
    sizes: Sequence[Sequence[int]]
    """Sizes of each round, in bytes."""
    links: PlannedLinks
    seconds: float
    """Time limit for all rounds together."""


def communicating_pairs(plan: LaunchPlan, stage: int) -> Iterator[tuple[int, int]]:
    """Pairs of a worker of a stage and a worker of the next stage between which minibatches travel."""
    senders, receivers = plan.pipeline[stage].workers, plan.pipeline[stage + 1].workers
    count = min(math.lcm(len(senders), len(receivers)), MOST_MINIBATCHES)
    return ((senders[number % len(senders)], receivers[number % len(receivers)]) for number in range(count))


def teams_across_servers(plan: LaunchPlan, assignment: RankAssignment) -> list[CommunicatingTeam]:
    """The busiest pair of every two servers that exchange messages, and every stage on several servers.

    Sorted by `CommunicatingTeam.share`, largest first.
    """
    busiest: dict[frozenset[int], CommunicatingTeam] = {}
    rings = []
    for stage, prediction in enumerate(plan.predictions):
        pace = prediction.minibatch_s or math.inf
        if stage + 1 < len(plan.pipeline):
            share = (prediction.boundary_s or 0.0) / pace
            for pair in communicating_pairs(plan, stage):
                ends = frozenset(assignment.servers[worker] for worker in pair)
                if len(ends) > 1 and (ends not in busiest or busiest[ends].share < share):
                    busiest[ends] = CommunicatingTeam(pair, stage, False, share)
        workers = plan.pipeline[stage].workers
        if plan.mode == "training" and len({assignment.servers[worker] for worker in workers}) > 1:
            allreduce_s = (prediction.sync_s or 0.0) / (plan.accumulate or len(workers))
            rings.append(CommunicatingTeam(workers, stage, True, allreduce_s / pace))
    return sorted([*busiest.values(), *rings], key=lambda team: (-team.share, team.stage, team.workers))


def probe_rounds(plan: LaunchPlan, assignment: RankAssignment) -> list[list[CommunicatingTeam]]:
    """The teams by rounds. Teams of one round are measured at the same time, as they have no server in common."""

    def servers_of(team: CommunicatingTeam) -> set[Hashable]:
        return {assignment.servers[worker] for worker in team.workers}

    return pack_rounds(teams_across_servers(plan, assignment), servers_of)[:MOST_ROUNDS]


def make_task(plan: LaunchPlan, rounds: Sequence[Sequence[CommunicatingTeam]], seconds: float) -> ProbeTask | None:
    """The probe of these rounds; None for a plan that does not say which links it was made for."""
    if plan.links is None:
        return None
    return ProbeTask(rounds, [_sizes(plan, teams) for teams in rounds], plan.links, seconds)


def _sizes(plan: LaunchPlan, teams: Sequence[CommunicatingTeam]) -> tuple[int, ...]:
    """Sizes up to the gradients of the largest stage that reduces: small all-reduces are slower per byte."""
    most = max((plan.predictions[team.stage].parameter_bytes or 0 for team in teams if team.is_ring), default=0)
    return tuple(size for size in PROBE_SIZES if not most or size <= max(most, PROBE_SIZES[0]))


def probe_links(plan: LaunchPlan, task: ProbeTask, groups: Groups) -> dict[CommunicatingTeam, float]:
    """Measured rates of the teams, in bytes/s, known to all workers. All of them call this with the same task."""
    with peer_loss_explained("a link failed while it was measured"):
        return _Probe(plan, task, groups).run()


class _Probe:
    def __init__(self, plan: LaunchPlan, task: ProbeTask, groups: Groups) -> None:
        self._task, self._groups = task, groups
        self._rank = dist.get_rank()
        self._device = process_groups.device_of(plan)
        self._messages = 0
        """Messages so far. The count is the same in all workers, so that no two messages have the same number."""
        self._transport = Transport(0, self._rank, self._device, groups.everyone)

    def run(self) -> dict[CommunicatingTeam, float]:
        """Measure for about as long as the task says."""
        began, count = time.monotonic(), len(self._task.rounds)
        mine: dict[CommunicatingTeam, float] = {}
        for number, (teams, sizes) in enumerate(zip(self._task.rounds, self._task.sizes, strict=True)):
            left = process_groups.broadcast(
                began + self._task.seconds - time.monotonic(), 0, self._groups.everyone, float
            )
            if left < LEAST_S:
                break
            mine |= self._round(teams, sizes, TimeLimits(left / (count - number), ENOUGH_S))
        slowest: dict[CommunicatingTeam, float] = {}
        for rates in process_groups.gather_everywhere(mine, self._groups.everyone, dict[CommunicatingTeam, float]):
            for team, rate in rates.items():  # an operation is done when its last member is
                slowest[team] = min(rate, slowest.get(team, rate))
        return slowest

    def _round(
        self, teams: Sequence[CommunicatingTeam], sizes: Sequence[int], limits: TimeLimits
    ) -> dict[CommunicatingTeam, float]:
        """The rate of this worker's team, if it has one in this round."""
        team = next((one for one in teams if self._rank in one.workers), None)

        def make(size: int, number: int) -> Operation | None:
            if team is None:
                return None
            if team.is_ring:
                assert self._groups.replicas is not None
                return AllReduce(self._groups.replicas, size, self._device)
            peer = team.workers[0] if team.workers[1] == self._rank else team.workers[1]
            return TransportExchange(self._transport, self._rank, peer, size, self._messages + number, self._device)

        samples, messages = time_over_sizes(sizes, limits, agree_over(self._groups.everyone), make)
        self._messages += messages
        if team is None:
            return {}
        return {team: measured_rate(team, *samples[-1], self._task.links)}


def measured_rate(team: CommunicatingTeam, size: int, seconds: float, levels: PlannedLinks) -> float:
    """The rate in bytes/s of an operation of `size` bytes.

    The planned latency of every step is subtracted from its time, but at most half of the time.
    """
    count = len(team.workers)
    steps, sent = (2 * (count - 1), 2 * (count - 1) / count * size) if team.is_ring else (1, size)
    _, latency_s = team.planned(levels)
    return sent / max(seconds - steps * latency_s, seconds / 2)
