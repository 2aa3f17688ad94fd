"""Which way of averaging the replicas of a stage use, from what the command line asks for."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pipeplan_launch.averaging import Averaging
from pipeplan_launch.buckets import Exchange
from pipeplan_launch.compression import compressed
from pipeplan_launch.engine import Place
from pipeplan_launch.significance import Servers, SignificanceFilter, by_server


def exchange_for(
    averaging: Averaging,
    place: Place,
    group: dist.ProcessGroup | None,
    parameters: Mapping[str, nn.Parameter],
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
    names = {id(parameter): name for name, parameter in parameters.items()}

    def rates() -> dict[str, float]:
        """The learning rate of each parameter now; 1 where the optimiser has none by that name."""
        groups = optimizer.param_groups
        return {names[id(one)]: float(group.get("lr", 1.0)) for group in groups for one in group["params"]}

    return SignificanceFilter(Servers(servers, place.rank, group), averaging.significance, rates)
