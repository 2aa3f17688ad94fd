"""Measures the rates that messages and all-reduces between servers reach, for about two seconds before training.

All workers go through the same rounds, whether or not they take part in one. The time limit is for all rounds together:
those that come after it is used up, which carry the least traffic, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from pipeplan_launch import processes
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.linkprobe.settings import KIB, MIB
from pipeplan_launch.linkprobe.traffic import Exchange, Limits, Operation, Reduction, agree_over, over_sizes
from pipeplan_launch.placement.crossing import Team
from pipeplan_launch.placement.levels import Levels
from pipeplan_launch.processes import Groups
from pipeplan_launch.transport import Transport, explained

SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
ENOUGH_S = 0.05
"""A size whose operation takes longer than this is the last one of its round."""
LEAST_S = 0.02
"""A round does not begin with less time than this left."""


@dataclass(frozen=True)
class Task:
    """The measurements of a probe. Worker 0 sends it to all workers."""

    rounds: Sequence[Sequence[Team]]
    sizes: Sequence[Sequence[int]]
    """Sizes of each round, in bytes."""
    links: Levels
    seconds: float
    """Time limit for all rounds together."""


def make_task(plan: LaunchPlan, rounds: Sequence[Sequence[Team]], seconds: float) -> Task | None:
    """The probe of these rounds; None for a plan that does not say which links it was made for."""
    if plan.links is None:
        return None
    return Task(rounds, [_sizes(plan, teams) for teams in rounds], plan.links, seconds)


def _sizes(plan: LaunchPlan, teams: Sequence[Team]) -> tuple[int, ...]:
    """Sizes up to the gradients of the largest stage that reduces: small all-reduces are slower per byte."""
    most = max((plan.predictions[team.stage].parameter_bytes or 0 for team in teams if team.is_ring), default=0)
    return tuple(size for size in SIZES if not most or size <= max(most, SIZES[0]))


def probe_links(plan: LaunchPlan, task: Task, groups: Groups, timeout_s: float) -> dict[Team, float]:
    """Measured rates of the teams, in bytes/s, known to all workers. All of them call this with the same task."""
    with explained("a link failed while it was measured"):
        return _Probe(plan, task, groups, timeout_s).run()


class _Probe:
    def __init__(self, plan: LaunchPlan, task: Task, groups: Groups, timeout_s: float) -> None:
        self._task, self._groups = task, groups
        self._rank = dist.get_rank()
        self._device = processes.device_of(plan)
        self._messages = 0
        """Messages so far. The count is the same in all workers, so that no two messages have the same number."""
        pairs = [
            team.workers for teams in task.rounds for team in teams if not team.is_ring and self._rank in team.workers
        ]
        peers = sorted({worker for pair in pairs for worker in pair} - {self._rank})
        self._transport = Transport(0, self._rank, self._device, peers, timeout_s, groups.everyone)
        self._transport.open()

    def run(self) -> dict[Team, float]:
        """Measure for about as long as the task says."""
        began, count = time.monotonic(), len(self._task.rounds)
        mine: dict[Team, float] = {}
        for number, (teams, sizes) in enumerate(zip(self._task.rounds, self._task.sizes, strict=True)):
            left = processes.broadcast(began + self._task.seconds - time.monotonic(), 0, self._groups.everyone)
            if left < LEAST_S:
                break
            mine |= self._round(teams, sizes, Limits(left / (count - number), ENOUGH_S))
        slowest: dict[Team, float] = {}
        for rates in processes.exchange(mine, self._groups.everyone):
            for team, rate in rates.items():  # an operation is done when its last member is
                slowest[team] = min(rate, slowest.get(team, rate))
        return slowest

    def _round(self, teams: Sequence[Team], sizes: Sequence[int], limits: Limits) -> dict[Team, float]:
        """The rate of this worker's team, if it has one in this round."""
        team = next((one for one in teams if self._rank in one.workers), None)

        def make(size: int, number: int) -> Operation | None:
            if team is None:
                return None
            if team.is_ring:
                assert self._groups.replicas is not None
                return Reduction(self._groups.replicas, size, self._device)
            peer = team.workers[0] if team.workers[1] == self._rank else team.workers[1]
            return Exchange(self._transport, self._rank, peer, size, self._messages + number, self._device)

        samples, messages = over_sizes(sizes, limits, agree_over(self._groups.everyone), make)
        self._messages += messages
        if team is None:
            return {}
        return {team: rate_of(team, *samples[-1], self._task.links)}


def rate_of(team: Team, size: int, seconds: float, levels: Levels) -> float:
    """The rate in bytes/s of an operation of `size` bytes.

    The planned latency of every step is subtracted from its time, but at most half of the time.
    """
    count = len(team.workers)
    steps, sent = (2 * (count - 1), 2 * (count - 1) / count * size) if team.is_ring else (1, size)
    _, latency_s = team.planned(levels)
    return sent / max(seconds - steps * latency_s, seconds / 2)
