"""The stage optimiser: trained parameters, their weight versions, the job's optimiser, its learning rates, and
clipping.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan_launch import clipping
from pipeplan_launch.engine import Place
from pipeplan_launch.job import StageInfo
from pipeplan_launch.rates import Rates
from pipeplan_launch.stash import WeightVersions
from pipeplan_launch.usercode import user_code


class Learner:
    """Turns averaged gradients into the next version of a stage's weights."""

    def __init__(self, place: Place, flush: dist.ProcessGroup | None) -> None:
        """`flush`: all workers of all stages, if the schedule flushes. Raises `LaunchError`."""
        parameters = place.program.parameters_by_name()
        self.trained: dict[str, nn.Parameter] = _trainable(parameters)
        self.optimizer: Optimizer | None = None
        """None if the stage trains nothing."""
        self.rates: Rates | None = None
        if self.trained:
            info = _stage_info(place, self.trained)
            with user_code("the job's optimizer"):
                self.optimizer = place.job.make_optimizer(list(self.trained.values()), info)
            self.rates = Rates(place.job, self.optimizer, info)
        self.versions = WeightVersions(parameters)
        self._clipping = clipping.of(place, flush)

    def clip(self, averaged: Mapping[str, Tensor]) -> None:
        """Clip the gradients of an update in place, as the job asks."""
        if self._clipping is not None:
            self._clipping.clip(averaged.values())

    def step(self, averaged: Mapping[str, Tensor]) -> None:
        """Make the next version of the weights from gradients by parameter name."""
        changed = []
        for name, gradient in averaged.items():
            parameter = self.trained[name]
            parameter.grad = gradient
            changed.append(parameter)
        # Stages that train nothing count updates too: minibatches ask for their weights by the number of updates.
        self.versions.update(changed, self.optimizer.step if self.optimizer is not None else _no_step)
        for parameter in changed:
            parameter.grad = None


def _no_step() -> None:
    """The optimiser step of a stage that trains nothing."""


def _stage_info(place: Place, trained: Mapping[str, nn.Parameter]) -> StageInfo:
    plan = place.plan
    return StageInfo(
        stage=place.stage,
        stages=len(plan.pipeline),
        replicas=place.replicas,
        minibatch=plan.minibatch,
        minibatches_per_update=plan.schedule.group_size(plan.shapes[place.stage]),
        schedule=plan.schedule.name,
        named_parameters=tuple(trained.items()),
    )


def _trainable(parameters: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, a tied one under its first name only."""
    seen: set[int] = set()
    result: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            result[name] = parameter
    return result
