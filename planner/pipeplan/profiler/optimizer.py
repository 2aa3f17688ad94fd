"""What a job's optimiser keeps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeplan_launch.job import Job, StageInfo
from pipeplan_launch.usercode import user_code


def optimizer_state(job: Job) -> tuple[str, float]:
    """(name, bytes of state per byte of parameters) of the job's optimiser, from a step on two stand-in parameters."""
    parameters = [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))]
    names = _names(job.model)
    stage = StageInfo(minibatch=job.minibatch, named_parameters=tuple(zip(names, parameters, strict=True)))
    with user_code("the job's optimizer"):
        optimizer = job.make_optimizer(list(parameters), stage)
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


def _names(model: nn.Module) -> tuple[str, str]:
    """Of a matrix and of a vector that the model trains: an optimiser may group its parameters by name."""
    trained = [(name, one.ndim) for name, one in model.named_parameters() if one.requires_grad]
    matrix = next((name for name, dimensions in trained if dimensions > 1), "weight")
    vector = next((name for name, dimensions in trained if dimensions == 1 and name != matrix), "bias")
    return matrix, vector
