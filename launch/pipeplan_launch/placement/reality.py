"""Rates between the workers of a plan where they really are, as far as known. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.placement.crossing import Team, hops, meetings
from pipeplan_launch.placement.levels import Levels
from pipeplan_launch.placement.seats import Seats


@dataclass(frozen=True)
class Reality:
    """A plan with `links`, on these seats, with what a probe measured.

    Two workers of one server have what is planned between them. Others have what was measured between their servers;
    without that what is planned, or where they were meant to share one, what is planned between servers. Nothing is
    taken to be faster than planned.
    """

    plan: LaunchPlan
    seats: Seats
    measured: Mapping[Team, float] = field(default_factory=dict)
    """Bytes/s: of messages between two servers; of the all-reduce of a stage, as the formula of a ring counts them."""

    @property
    def levels(self) -> Levels:
        """What is planned."""
        assert self.plan.links is not None
        return self.plan.links

    def message_rate(self, stage: int) -> float:
        """Of the slowest link between a stage and the next, bytes/s."""
        return min(self._pair(*pair)[0] for pair in set(meetings(self.plan, stage)))

    def ring_s(self, stage: int) -> float:
        """One all-reduce among the replicas of a stage."""
        prediction, workers = self.plan.predictions[stage], self.plan.pipeline[stage].workers
        count, size, planned_s = len(workers), prediction.parameter_bytes, prediction.sync_s or 0.0
        if count == 1 or not size or not planned_s:
            return planned_s
        planned = self.levels.ring(workers)[0]
        team = next((one for one in self.measured if one.is_ring and one.stage == stage), None)
        now = self.measured[team] if team is not None else min(self._pair(*hop)[1] for hop in hops(self.plan, stage))
        return planned_s + 2 * (count - 1) / count * size * max(0.0, 1 / now - 1 / planned)

    def cards_s(self) -> float:
        """How long a minibatch keeps the busiest card between servers busy: each as much longer than planned as the
        best link that it was measured with is slower."""
        longest = 0.0
        for number, level, below in self.levels.sharing_ends():
            best = [math.inf] * (len(below) - 1)
            ends = self.levels.levels[number - 1] if number else None
            for team, rate in self.measured.items():
                slower = self.planned(team) / rate
                inside = {ends.component(worker) if ends is not None else worker for worker in team.workers}
                if len(inside) > 1:
                    for component in inside:
                        best[component] = min(best[component], slower)
            for busy, slower in zip(level.cards_s, best, strict=True):
                longest = max(longest, busy * max(1.0, slower if math.isfinite(slower) else 1.0))
        return longest

    def planned(self, team: Team) -> float:
        """What the plan was made for, bytes/s."""
        return (self.levels.ring if team.is_ring else self.levels.message)(team.workers)[0]

    def _pair(self, one: int, other: int) -> tuple[float, float]:
        """Bytes/s of messages and of all-reduces over the link between two workers."""
        seats = self.seats
        number, at = self.levels.joining((one, other))
        if seats.servers[one] != seats.servers[other] and seats.meant[one] == seats.meant[other]:
            number, at = self.levels.above((one, other)) or (number, at)
        level = self.levels.levels[number]
        message, ring = level.sendrecv[at], level.allreduce[at]
        found = self._by_ends.get(frozenset((seats.servers[one], seats.servers[other])))
        if found is None:
            return message, ring
        share = ring / message if math.isfinite(message) else 1.0
        return min(message, found), min(ring, found * share)

    @cached_property
    def _by_ends(self) -> dict[frozenset[int], float]:
        """Rates of messages, by the two servers."""
        servers = self.seats.servers
        return {
            frozenset(servers[worker] for worker in team.workers): rate
            for team, rate in self.measured.items()
            if not team.is_ring
        }
