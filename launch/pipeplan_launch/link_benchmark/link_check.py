"""Compares the workers' servers and the links between them with the plan before training, and notes differences.

A note gives the planned rate, the measured rate and their ratio. It does not say what the difference costs: the planner
does, when it solves again for the links as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.elastic.process_groups import Groups
from pipeplan_launch.elastic.rendezvous import STORE_LOST
from pipeplan_launch.errors import listed
from pipeplan_launch.link_benchmark.link_probe import (
    CommunicatingTeam,
    ProbeTask,
    make_task,
    probe_links,
    probe_rounds,
)
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.rank_mapping.rank_assignment import RankAssignment

SLOWER = 1.25
"""Ratio of planned to measured rate below which a link counts as fast enough."""
BUSY = 0.05
"""Share of the time between two minibatches. A link that is busy for less, at its measured rate, is not named."""
MOST_NAMED = 2
"""Servers of the plan whose divided workers a note lists."""
CHECKED_KEY = "placed"
"""Key of the store that all attempts share: the server of every worker when this check last ran."""


@dataclass(frozen=True)
class LinkCheck:
    """The measurements on which worker 0 decides. Launches may differ in their options and their plan files."""

    task: ProbeTask | None
    """None if nothing is measured, and only the servers of the workers are compared."""


def check_planned_links(plan: LaunchPlan, groups: Groups, probe_s: float) -> list[str]:
    """Measure links between servers for `probe_s` seconds in all; returns the notes for the user, at worker 0 only.

    All workers call this. Nothing is measured where all workers are on one server, nor after a restart on the same
    servers. Worker 0's options and plan decide what is measured.
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
    """The busiest link, at its measured rate, of those slower than planned; None if none is slower."""

    def busy(team: CommunicatingTeam) -> float:
        return team.share * _times_slower(plan, team, measured[team])

    slow = [team for team in measured if _times_slower(plan, team, measured[team]) >= SLOWER and busy(team) >= BUSY]
    return max(slow, key=busy, default=None)


def _times_slower(plan: LaunchPlan, team: CommunicatingTeam, rate: float) -> float:
    """Ratio of planned to measured rate; 0 for a link that the plan takes to be unlimited."""
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
