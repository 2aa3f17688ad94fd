"""Chooses how the replicas of a stage average their gradients, from the options of the command line."""

from __future__ import annotations

import torch.distributed as dist
from torch.optim import Optimizer

from pipeplan_launch.comm.buckets import BucketExchange
from pipeplan_launch.comm.gaia_filter import ReplicasByServer, SignificanceFilter, StepSizes
from pipeplan_launch.comm.gradient_compression import compressed_exchange
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.averaging_options import GradientAveraging
from pipeplan_launch.plan.launch_plan import LaunchPlan


def choose_exchange(
    averaging: GradientAveraging,
    plan: LaunchPlan,
    stage: int,
    rank: int,
    group: dist.ProcessGroup | None,
    optimizer: Optimizer | None,
    weighted: bool = False,
) -> BucketExchange | None:
    """The exchange that a worker of a stage uses in place of the exact mean.

    Returns None for the exact mean: where no option asks for anything else, where the stage has one replica (`group` is
    None then), and for `--significance` where all replicas are on one server. Raises `LaunchError` for an exchange that
    holds gradients back, if minibatches are `weighted`: their scale is known only after the exchange.
    """
    if group is None or optimizer is None:
        return None
    if weighted and (averaging.significance is not None or _is_powersgd(averaging)):
        option = "--significance" if averaging.significance is not None else "--compress powersgd"
        raise LaunchError(
            f"{option} holds parts of gradients back for later updates, whose minibatches have other weights under the "
            "job's loss_weight: run with --compress bf16, or with neither"
        )
    if averaging.compression is not None:
        return compressed_exchange(group, averaging.compression)
    servers = plan.workers_by_server(stage)
    if averaging.significance is None or len(servers) == 1:
        return None
    return SignificanceFilter(ReplicasByServer(servers, rank, group), averaging.significance, StepSizes(optimizer))


def _is_powersgd(averaging: GradientAveraging) -> bool:
    return averaging.compression is not None and averaging.compression.kind == "powersgd"


def note_on_unused_option(averaging: GradientAveraging, plan: LaunchPlan) -> str | None:
    """The message for a user whose averaging options make no difference to this plan; None where they do."""
    stages = range(len(plan.pipeline))
    if averaging.compression is not None and all(len(stage.workers) == 1 for stage in plan.pipeline):
        return "--compress changes nothing, as no stage of the plan has replicas"
    if averaging.shards_optimizer and all(len(stage.workers) == 1 for stage in plan.pipeline):
        return "--shard-optimizer changes nothing, as no stage of the plan has replicas"
    if averaging.significance is not None and all(len(plan.workers_by_server(stage)) == 1 for stage in stages):
        return "--significance changes nothing, as no stage of the plan has replicas on several servers"
    return None
