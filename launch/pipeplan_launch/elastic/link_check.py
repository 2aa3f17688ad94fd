"""Compares the workers' servers and the links between them with the plan before training, and notes differences.

A probe measures the rates of teams: workers that communicate across servers under the plan, busiest first. All workers
take part in all rounds, even without a team in a round. One time limit covers all rounds. When the time is up, the
remaining rounds, which have the least traffic, are left out.

A note gives the planned rate, the measured rate and their ratio. It does not say what the difference costs. To find
out, solve again with the measured links.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.comm.timed_traffic import TeamTimer, TimeLimits
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.elastic.process_groups import Groups
from pipeplan_launch.elastic.rendezvous import STORE_LOST
from pipeplan_launch.errors import listed
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.planned_links import pack_rounds
from pipeplan_launch.rank_mapping.rank_assignment import RankAssignment

KIB, MIB = 2**10, 2**20
MOST_ROUNDS = 20
"""Largest number of rounds in a probe. With the default of two seconds, each round then has a tenth of a second."""
MOST_MINIBATCHES = 2_000
"""Largest number of minibatches whose replica pairs are listed. Later minibatches mostly repeat these pairs."""
PROBE_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
ENOUGH_S = 0.05
"""A round tries no further size after an operation that took longer than this."""
LEAST_S = 0.02
"""A round does not begin if less time than this remains."""
SLOWER = 1.25
"""Ratio of planned to measured rate below which a link counts as fast enough."""
BUSY = 0.05
"""Smallest share of the step time for which a link must be busy, at its measured rate, to be named in a note."""
MOST_NAMED = 2
"""A note lists at most this number of planned servers whose workers are on different machines."""
CHECKED_KEY = "placed"
"""Key in the store of all attempts. Its value lists the server of every worker when this check last ran."""


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
    planned: float = math.inf
    """Planned rate in bytes/s; infinite if the plan does not contain it."""
    latency_s: float = 0.0
    largest: int = 0
    """Bytes of a ring's gradients. Larger sizes are not measured, because large messages have higher rates."""

    def times_slower(self, rate: float) -> float:
        """Ratio of planned to measured rate; 0 for a link without a planned rate."""
        return self.planned / rate if math.isfinite(self.planned) else 0.0

    def busy(self, rate: float) -> float:
        """The share of the step time for which the link is busy at this measured rate."""
        return self.share * self.times_slower(rate)


Rounds = list[list[CommunicatingTeam]]
"""Teams of one round are measured at the same time, as they have no server in common."""


def check_planned_links(plan: LaunchPlan, groups: Groups, probe_s: float) -> list[str]:
    """Measure links between servers for `probe_s` seconds in all; returns the notes for the user, at worker 0 only.

    All workers call this. Nothing is measured if all workers are on one server, or after a restart on the same servers.
    Worker 0's options and plan decide what is measured, because launches may differ in them.
    """
    assignment = groups.assignment
    if assignment.is_one_server:
        return []
    is_worker_0 = dist.get_rank() == 0
    rounds = _rounds_to_measure(plan, groups, probe_s) if is_worker_0 else None
    rounds = process_groups.broadcast(rounds, 0, groups.everyone, Rounds | None)
    if rounds is None:
        return []
    measured = probe_links(plan, rounds, probe_s, groups) if rounds else {}
    if not is_worker_0:
        return []
    with peer_loss_explained(STORE_LOST):
        groups.attempt.launch_store.set(CHECKED_KEY, _servers(groups))
    return link_notes(assignment, measured)


def _rounds_to_measure(plan: LaunchPlan, groups: Groups, probe_s: float) -> Rounds | None:
    """The rounds of this attempt; [] if only the servers of the workers are compared, None if nothing is checked."""
    launch_store = groups.attempt.launch_store
    with peer_loss_explained(STORE_LOST):
        if plan.emulated or (
            launch_store.check([CHECKED_KEY]) and launch_store.get(CHECKED_KEY).decode() == _servers(groups)
        ):
            return None
    return probe_rounds(plan, groups.assignment) if probe_s and plan.links is not None else []


def _servers(groups: Groups) -> str:
    assignment = groups.assignment
    servers = dict(zip(assignment.workers, (where.server for where in assignment.locations), strict=True))
    return repr(sorted(servers.items()))


def probe_rounds(plan: LaunchPlan, assignment: RankAssignment) -> Rounds:
    """The teams by rounds, busiest first."""

    def servers_of(team: CommunicatingTeam) -> set[Hashable]:
        return {assignment.servers[worker] for worker in team.workers}

    return pack_rounds(teams_across_servers(plan, assignment), servers_of)[:MOST_ROUNDS]


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
                    rate = plan.links.message(pair) if plan.links else (math.inf, 0.0)
                    busiest[ends] = CommunicatingTeam(pair, stage, False, share, *rate)
        workers = plan.pipeline[stage].workers
        if plan.mode == "training" and len({assignment.servers[worker] for worker in workers}) > 1:
            allreduce_s = (prediction.sync_s or 0.0) / (plan.accumulate or len(workers))
            rate = plan.links.ring(workers) if plan.links else (math.inf, 0.0)
            largest = math.ceil(prediction.parameter_bytes or 0)
            rings.append(CommunicatingTeam(workers, stage, True, allreduce_s / step_time, *rate, largest))
    return sorted([*busiest.values(), *rings], key=lambda team: (-team.share, team.stage, team.workers))


def communicating_pairs(plan: LaunchPlan, stage: int) -> Iterator[tuple[int, int]]:
    """Pairs of a worker of a stage and a worker of the next stage between which minibatches travel."""
    senders, receivers = plan.pipeline[stage].workers, plan.pipeline[stage + 1].workers
    count = min(math.lcm(len(senders), len(receivers)), MOST_MINIBATCHES)
    return ((senders[number % len(senders)], receivers[number % len(receivers)]) for number in range(count))


def probe_links(plan: LaunchPlan, rounds: Rounds, seconds: float, groups: Groups) -> dict[CommunicatingTeam, float]:
    """Measured rates of the teams, in bytes/s, known to all workers. All of them call this with the same rounds.

    `seconds`: time limit for all rounds together; the value of worker 0 counts.
    """
    rank, began = dist.get_rank(), time.monotonic()
    timer = TeamTimer(process_groups.device_of(plan), groups.everyone)
    mine: dict[CommunicatingTeam, float] = {}
    with peer_loss_explained("a link failed while it was measured"):
        for number, teams in enumerate(rounds):
            left_s = process_groups.broadcast(began + seconds - time.monotonic(), 0, groups.everyone, float)
            if left_s < LEAST_S:
                break
            team = next((one for one in teams if rank in one.workers), None)
            limits, ring = TimeLimits(left_s / (len(rounds) - number), ENOUGH_S), None
            if team is not None and team.is_ring:
                ring = groups.replicas
                assert ring is not None
            most = max(one.largest for one in teams)
            sizes = [size for size in PROBE_SIZES if not most or size <= max(most, PROBE_SIZES[0])]
            samples = timer(None if team is None else team.workers, sizes, limits, ring)
            if team is not None:
                mine[team] = measured_rate(team, *samples[-1])
        slowest: dict[CommunicatingTeam, float] = {}
        for rates in process_groups.gather_everywhere(mine, groups.everyone, dict[CommunicatingTeam, float]):
            for team, rate in rates.items():  # an operation is done when its last worker is done
                slowest[team] = min(rate, slowest.get(team, rate))
    return slowest


def measured_rate(team: CommunicatingTeam, size: int, seconds: float) -> float:
    """The rate in bytes/s of an operation of `size` bytes.

    The planned latency of every step is subtracted from its time, but at most half of the time.
    """
    count = len(team.workers)
    steps, sent = (2 * (count - 1), 2 * (count - 1) / count * size) if team.is_ring else (1, size)
    return sent / max(seconds - steps * team.latency_s, seconds / 2)


def link_notes(assignment: RankAssignment, measured: Mapping[CommunicatingTeam, float]) -> list[str]:
    """At most one line about workers on other servers than planned, and one about slow links.

    `measured`: the rates in bytes/s that a probe found; empty where nothing was measured.
    """
    planned_servers = assignment.planned_servers
    inside = {
        team: rate for team, rate in measured.items() if len({planned_servers[worker] for worker in team.workers}) == 1
    }
    lines = []
    if assignment.divided_servers:
        worst = _worst(inside)
        rates = "" if worst is None else f": {_rates(worst, inside[worst])}"
        if worst is not None or not inside:
            lines.append(
                f"note: {_divided_text(assignment)}{rates}; start as many workers on each server as the plan has "
                "there, or solve again for these servers"
            )
    between = {team: rate for team, rate in measured.items() if team not in inside}
    slowest = _worst(between)
    if slowest is not None:
        lines.append(
            f"note: {_link_text(assignment, slowest)}: {_rates(slowest, between[slowest])}; check the network, "
            "or measure it with pipeplan profile --links and solve again"
        )
    return lines


def _worst(measured: Mapping[CommunicatingTeam, float]) -> CommunicatingTeam | None:
    """The busiest link, at its measured rate, among the links slower than planned; None if no link is slower."""
    slow = [one for one, rate in measured.items() if one.times_slower(rate) >= SLOWER and one.busy(rate) >= BUSY]
    return max(slow, key=lambda team: team.busy(measured[team]), default=None)


def _rates(team: CommunicatingTeam, rate: float) -> str:
    slower = team.times_slower(rate)
    return f"planned {format_rate(team.planned)}, measured {format_rate(rate)}, {slower:.2g} times slower"


def format_rate(rate: float) -> str:
    """A rate in bytes/s for people: `1.9 Gbit/s`."""
    bits = rate * 8
    for factor, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= factor:
            return f"{bits / factor:.3g} {name}"
    return f"{bits / 1e3:.3g} Kbit/s"


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
