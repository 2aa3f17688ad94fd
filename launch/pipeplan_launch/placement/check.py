"""Before training: is the placement the one that the planner meant, and if not, what does that cost?"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from pipeplan_launch import processes
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.gathering import STORE_LOST
from pipeplan_launch.placement.crossing import rounds
from pipeplan_launch.placement.notes import notes
from pipeplan_launch.placement.probe import Task, probe, task
from pipeplan_launch.processes import Groups
from pipeplan_launch.progress import say
from pipeplan_launch.transport import explained

SAID = "placed"
"""Key of all attempts: the server of every worker when this was last looked at."""


@dataclass(frozen=True)
class Agenda:
    """What worker 0 wants done: launches may have other options, and other files."""

    task: Task | None


def check(plan: LaunchPlan, groups: Groups, probe_s: float, timeout_s: float) -> None:
    """Worker 0 says in a line where it matters. All workers call this; links are measured for `probe_s` seconds.

    After a restart only if workers are on other servers than before. Nothing is measured on one server. What is
    measured, worker 0 decides by its own options and plan.
    """
    seats = groups.seats
    if seats.is_one_server:
        return
    leads = dist.get_rank() == 0
    agenda = processes.share(_agenda(plan, groups, probe_s) if leads else None, 0, groups.everyone)
    if agenda is None:
        return
    measured = probe(plan, agenda.task, groups, timeout_s) if agenda.task is not None else {}
    if leads:
        for line in notes(plan, seats, measured):
            say(line)
        with explained(STORE_LOST):
            groups.attempt.launch.set(SAID, _servers(groups))


def _agenda(plan: LaunchPlan, groups: Groups, probe_s: float) -> Agenda | None:
    """None where there is nothing to do."""
    launch = groups.attempt.launch
    with explained(STORE_LOST):
        if plan.emulated or (launch.check([SAID]) and launch.get(SAID).decode() == _servers(groups)):
            return None
    teams = rounds(plan, groups.seats) if probe_s and plan.links is not None else []
    return Agenda(task(plan, teams, probe_s) if teams else None)


def _servers(groups: Groups) -> str:
    seats = groups.seats
    servers = dict(zip(seats.workers, (where.server for where in seats.wheres), strict=True))
    return repr(sorted(servers.items()))
