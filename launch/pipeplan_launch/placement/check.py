"""Before training: are the workers and the links between servers as the plan assumes?"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from pipeplan_launch import processes
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.gathering import STORE_LOST
from pipeplan_launch.placement.crossing import rounds
from pipeplan_launch.placement.notes import notes
from pipeplan_launch.placement.probe import Task, make_task, probe_links
from pipeplan_launch.processes import Groups
from pipeplan_launch.transport import explained

CHECKED_KEY = "placed"
"""Key of the store that all attempts share: the server of every worker when this check last ran."""


@dataclass(frozen=True)
class Agenda:
    """The measurements that worker 0 asks for. Launches may differ in their options and their plan files."""

    task: Task | None


def check(plan: LaunchPlan, groups: Groups, probe_s: float, timeout_s: float) -> list[str]:
    """Measure links between servers for `probe_s` seconds in all; returns the notes for the user, at worker 0 only.

    All workers call this. Nothing is measured where all workers are on one server, nor after a restart on the same
    servers. Worker 0's options and plan decide what is measured.
    """
    seats = groups.seats
    if seats.is_one_server:
        return []
    leads = dist.get_rank() == 0
    agenda = processes.broadcast(_agenda(plan, groups, probe_s) if leads else None, 0, groups.everyone)
    if agenda is None:
        return []
    measured = probe_links(plan, agenda.task, groups, timeout_s) if agenda.task is not None else {}
    if not leads:
        return []
    with explained(STORE_LOST):
        groups.attempt.launch.set(CHECKED_KEY, _servers(groups))
    return notes(plan, seats, measured)


def _agenda(plan: LaunchPlan, groups: Groups, probe_s: float) -> Agenda | None:
    """None where there is nothing to check."""
    launch = groups.attempt.launch
    with explained(STORE_LOST):
        if plan.emulated or (launch.check([CHECKED_KEY]) and launch.get(CHECKED_KEY).decode() == _servers(groups)):
            return None
    teams = rounds(plan, groups.seats) if probe_s and plan.links is not None else []
    return Agenda(make_task(plan, teams, probe_s) if teams else None)


def _servers(groups: Groups) -> str:
    seats = groups.seats
    servers = dict(zip(seats.workers, (where.server for where in seats.wheres), strict=True))
    return repr(sorted(servers.items()))
