"""Which way of averaging the replicas of a stage use, from what the command line asks for."""

from __future__ import annotations

import torch.distributed as dist
from torch.optim import Optimizer

from pipeplan_launch.averaging import Averaging
from pipeplan_launch.buckets import Exchange
from pipeplan_launch.compression import compressed
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.engine import Place
from pipeplan_launch.significance import Servers, SignificanceFilter, StepSizes, by_server


def exchange_for(
    averaging: Averaging,
    place: Place,
    group: dist.ProcessGroup | None,
    optimizer: Optimizer | None,
) -> Exchange | None:
    """None for the plain mean: nothing else was asked for, or there is nothing between servers to filter.

    `group`: the replicas of the worker's stage, None where there is only one.
    """
    if group is None or optimizer is None:
        return None
    if averaging.compression is not None:
        return compressed(group, averaging.compression)
    servers = by_server(place.plan, place.stage)
    if averaging.significance is None or len(servers) == 1:
        return None
    return SignificanceFilter(Servers(servers, place.rank, group), averaging.significance, StepSizes(optimizer))


def note(averaging: Averaging, plan: LaunchPlan) -> str | None:
    """What to tell a user whose options make no difference to this plan."""
    stages = range(len(plan.pipeline))
    if averaging.compression is not None and all(len(stage.workers) == 1 for stage in plan.pipeline):
        return "--compress changes nothing, as no stage of the plan has replicas"
    if averaging.significance is not None and all(len(by_server(plan, stage)) == 1 for stage in stages):
        return "--significance changes nothing, as no stage of the plan has replicas on several servers"
    return None
