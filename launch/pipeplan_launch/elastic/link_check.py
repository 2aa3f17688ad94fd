"""Compares the workers' servers and the links between them with the plan before training, and notes differences.

A note gives the planned rate, the measured rate and their ratio. It does not say what the difference costs. To find
out, solve again with the measured links.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from pipeplan_launch.comm.p2p import Transport, peer_loss_explained
from pipeplan_launch.comm.timed_traffic import (
    AllReduce,
    Operation,
    TimeLimits,
    TransportExchange,
    agree_over,
    time_over_sizes,
)
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.elastic.process_groups import Groups
from pipeplan_launch.elastic.rendezvous import STORE_LOST
from pipeplan_launch.errors import listed
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.planned_links import PlannedLinks, pack_rounds
from pipeplan_launch.rank_mapping.rank_assignment import RankAssignment

# Measures the rates that messages and all-reduces between servers reach, for about two seconds before training.
#
# A probe measures teams: workers that communicate across servers under the plan, busiest first. All workers go through
# the same rounds, even without a team in a round. The time limit is for all rounds together: when it is used up, the
# remaining rounds, which have the least traffic, are left out.

KIB, MIB = 2**10, 2**20
MOST_ROUNDS = 20
"""Largest number of rounds in a probe. With the default of two seconds, each round then has a tenth of a second."""
MOST_MINIBATCHES = 2_000
"""Minibatches from which the pairs of replicas of two stages are listed. Later minibatches mostly repeat these
pairs."""
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
    """The busiest pair of workers for every two servers that exchange messages, and every stage on several servers.

    Sorted by `CommunicatingTeam.share`, largest first.
    """
    busiest: dict[frozenset[int], CommunicatingTeam] = {}
    rings = []
    for stage, prediction in enumerate(plan.predictions):
        step_time = prediction.minibatch_s or math.inf
        if stage + 1 < len(plan.pipeline):
            share = (prediction.boundary_s or 0.0) / step_time
            for pair in communicating_pairs(plan, stage):
                ends = frozenset(assignment.servers[worker] for worker in pair)
                if len(ends) > 1 and (ends not in busiest or busiest[ends].share < share):
                    busiest[ends] = CommunicatingTeam(pair, stage, False, share)
        workers = plan.pipeline[stage].workers
        if plan.mode == "training" and len({assignment.servers[worker] for worker in workers}) > 1:
            allreduce_s = (prediction.sync_s or 0.0) / (plan.accumulate or len(workers))
            rings.append(CommunicatingTeam(workers, stage, True, allreduce_s / step_time))
    return sorted([*busiest.values(), *rings], key=lambda team: (-team.share, team.stage, team.workers))


def probe_rounds(plan: LaunchPlan, assignment: RankAssignment) -> list[list[CommunicatingTeam]]:
    """The teams by rounds. Teams of one round are measured at the same time, as they have no server in common."""

    def servers_of(team: CommunicatingTeam) -> set[Hashable]:
        return {assignment.servers[worker] for worker in team.workers}

    return pack_rounds(teams_across_servers(plan, assignment), servers_of)[:MOST_ROUNDS]


def make_task(plan: LaunchPlan, rounds: Sequence[Sequence[CommunicatingTeam]], seconds: float) -> ProbeTask | None:
    """The probe of these rounds; None if the plan does not contain the links that it was made for."""
    if plan.links is None:
        return None
    return ProbeTask(rounds, [_sizes(plan, teams) for teams in rounds], plan.links, seconds)


def _sizes(plan: LaunchPlan, teams: Sequence[CommunicatingTeam]) -> tuple[int, ...]:
    """Sizes to measure, up to the gradients of the largest stage with an all-reduce: small ones are slower per byte."""
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
        """Number of messages so far. It is the same in all workers, so that no two messages have the same number."""
        self._transport = Transport(0, self._rank, self._device, groups.everyone)

    def run(self) -> dict[CommunicatingTeam, float]:
        """Measure for about `task.seconds`."""
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
            for team, rate in rates.items():  # an operation is done when its last worker is done
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


SLOWER = 1.25
"""Ratio of planned to measured rate below which a link counts as fast enough."""
BUSY = 0.05
"""Share of the time between two minibatches. A note names a link only if it is busy for longer, at its measured
rate."""
MOST_NAMED = 2
"""Largest number of planned servers that a note lists whose workers are on different machines."""
CHECKED_KEY = "placed"
"""Key of the store of all attempts. Its value is the server of every worker when this check last ran."""


@dataclass(frozen=True)
class LinkCheck:
    """The measurements that worker 0 decides on, because launches may differ in their options and plan files."""

    task: ProbeTask | None
    """None if only the servers of the workers are compared."""


def check_planned_links(plan: LaunchPlan, groups: Groups, probe_s: float) -> list[str]:
    """Measure links between servers for `probe_s` seconds in all; returns the notes for the user, at worker 0 only.

    All workers call this. Nothing is measured if all workers are on one server, or after a restart on the same servers.
    Worker 0's options and plan decide what is measured.
    """
    assignment = groups.assignment
    if assignment.is_one_server:
        return []
    is_worker_0 = dist.get_rank() == 0
    chosen = _choose_check(plan, groups, probe_s) if is_worker_0 else None
    check = process_groups.broadcast(chosen, 0, groups.everyone, LinkCheck | None)
    if check is None:
        return []
    measured = probe_links(plan, check.task, groups) if check.task is not None else {}
    if not is_worker_0:
        return []
    with peer_loss_explained(STORE_LOST):
        groups.attempt.launch_store.set(CHECKED_KEY, _servers(groups))
    return link_notes(plan, assignment, measured)


def _choose_check(plan: LaunchPlan, groups: Groups, probe_s: float) -> LinkCheck | None:
    """The check that this attempt needs; None if there is nothing to check."""
    launch_store = groups.attempt.launch_store
    with peer_loss_explained(STORE_LOST):
        if plan.emulated or (
            launch_store.check([CHECKED_KEY]) and launch_store.get(CHECKED_KEY).decode() == _servers(groups)
        ):
            return None
    teams = probe_rounds(plan, groups.assignment) if probe_s and plan.links is not None else []
    return LinkCheck(make_task(plan, teams, probe_s) if teams else None)


def _servers(groups: Groups) -> str:
    assignment = groups.assignment
    servers = dict(zip(assignment.workers, (where.server for where in assignment.locations), strict=True))
    return repr(sorted(servers.items()))


def link_notes(plan: LaunchPlan, assignment: RankAssignment, measured: Mapping[CommunicatingTeam, float]) -> list[str]:
    """At most one line about workers on other servers than planned, and one about slow links.

    `measured`: the rates in bytes/s that a probe found; empty where nothing was measured.
    """
    inside = {team: rate for team, rate in measured.items() if _is_planned_on_one_server(team, assignment)}
    lines = []
    if assignment.divided_servers:
        worst = _worst(plan, inside)
        rates = "" if worst is None else f": {_rates(plan, worst, inside[worst])}"
        if worst is not None or not inside:
            lines.append(
                f"note: {_divided_text(assignment)}{rates}; start as many workers on each server as the plan has "
                "there, or solve again for these servers"
            )
    between = {team: rate for team, rate in measured.items() if team not in inside}
    slowest = _worst(plan, between)
    if slowest is not None:
        lines.append(
            f"note: {_link_text(assignment, slowest)}: {_rates(plan, slowest, between[slowest])}; check the network, "
            "or measure it with pipeplan profile --links and solve again"
        )
    return lines


def format_rate(rate: float) -> str:
    """A rate in bytes/s for people: `1.9 Gbit/s`."""
    bits = rate * 8
    for factor, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= factor:
            return f"{bits / factor:.3g} {name}"
    return f"{bits / 1e3:.3g} Kbit/s"


def _is_planned_on_one_server(team: CommunicatingTeam, assignment: RankAssignment) -> bool:
    return len({assignment.planned_servers[worker] for worker in team.workers}) == 1


def _worst(plan: LaunchPlan, measured: Mapping[CommunicatingTeam, float]) -> CommunicatingTeam | None:
    """The busiest link, at its measured rate, among the links slower than planned; None if no link is slower."""

    def busy(team: CommunicatingTeam) -> float:
        return team.share * _times_slower(plan, team, measured[team])

    slow = [team for team in measured if _times_slower(plan, team, measured[team]) >= SLOWER and busy(team) >= BUSY]
    return max(slow, key=busy, default=None)


def _times_slower(plan: LaunchPlan, team: CommunicatingTeam, rate: float) -> float:
    """Ratio of planned to measured rate; 0 for a link without a planned rate."""
    assert plan.links is not None
    planned, _ = team.planned(plan.links)
    return planned / rate if math.isfinite(planned) else 0.0


def _rates(plan: LaunchPlan, team: CommunicatingTeam, rate: float) -> str:
    assert plan.links is not None
    planned = team.planned(plan.links)[0]
    return f"planned {format_rate(planned)}, measured {format_rate(rate)}, {planned / rate:.2g} times slower"


def _divided_text(assignment: RankAssignment) -> str:
    divided = assignment.divided_servers
    named = [_numbers(workers) for workers in divided[:MOST_NAMED]]
    more = len(divided) - len(named)
    servers = list(dict.fromkeys(assignment.name(assignment.servers[worker]) for worker in divided[0]))
    where = f"on different machines ({', '.join(servers[:4])}{', …' if len(servers) > 4 else ''})"
    who = "; ".join(named) + (f" and those of {more} more servers" if more else "")
    return f"workers {who}, meant to share a server{' each' if len(divided) > 1 else ''}, are {where}"


def _link_text(assignment: RankAssignment, team: CommunicatingTeam) -> str:
    if team.is_ring:
        return f"all-reduces of stage {team.stage} between servers"
    ends = " and ".join(dict.fromkeys(assignment.name(assignment.servers[worker]) for worker in team.workers))
    return f"the link between {ends}"


def _numbers(workers: Sequence[int]) -> str:
    if len(workers) > 2 and list(workers) == list(range(workers[0], workers[-1] + 1)):
        return f"{workers[0]} to {workers[-1]}"
    return listed(workers)
