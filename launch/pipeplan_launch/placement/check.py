"""Before training: is the placement the one that the planner meant, and if not, what does that cost?"""

from __future__ import annotations

import torch.distributed as dist

from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.placement.crossing import rounds
from pipeplan_launch.placement.notes import notes
from pipeplan_launch.placement.probe import probe
from pipeplan_launch.processes import Groups
from pipeplan_launch.progress import say


def check(plan: LaunchPlan, groups: Groups, probe_s: float, timeout_s: float) -> None:
    """Worker 0 says in a line where it matters. All workers call this; links are measured for `probe_s` seconds.

    In the first attempt of a launch only: after a restart all is as it was. Nothing is measured on one server.
    """
    seats = groups.seats
    if groups.attempt.number > 1 or plan.emulated or seats.is_one_server:
        return
    teams = rounds(plan, seats) if probe_s and plan.links is not None else []
    measured = probe(plan, teams, groups, probe_s, timeout_s) if teams else {}
    if dist.get_rank() == 0:
        for line in notes(plan, seats, measured):
            say(line)
