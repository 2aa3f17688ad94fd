"""What a job's optimiser keeps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeplan_launch.job import Job


def optimizer_state(job: Job) -> tuple[str, float]:
    """(name, bytes of state per byte of parameters) of the job's optimiser, from a step on two stand-in parameters."""
    parameters = [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))]
    optimizer = job.make_optimizer(list(parameters))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(
        value.nbytes
        for parameter in parameters
        for value in optimizer.state[parameter].values()
        if isinstance(value, Tensor) and value.numel() > 1
    )
    return type(optimizer).__name__, held / sum(parameter.nbytes for parameter in parameters)
