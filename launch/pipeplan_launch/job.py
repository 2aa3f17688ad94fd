"""A job: a model as its author wrote it, and the little that training it needs besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, default_collate

from pipeplan_launch import precision
from pipeplan_launch.errors import LaunchError


@dataclass(frozen=True)
class Data:
    """The samples of a job: map-style data sets whose samples are `(input, target)`, the input a tensor or a tuple."""

    train: Dataset[Any]
    test: Dataset[Any] | None = None


@dataclass(frozen=True)
class Batch:
    """One minibatch: the model's inputs, in order, and the target (None where the job has no data)."""

    inputs: tuple[Tensor, ...]
    target: Any


@dataclass(frozen=True)
class Job:
    """What to train. Only `model` and one of `inputs` and `data` are needed to profile and plan."""

    model: nn.Module
    """The model, unmodified."""
    inputs: Callable[[int], Tensor | tuple[Tensor, ...]] | None = None
    """Example inputs for a minibatch of n samples; without it, the first n samples of `data.train`."""
    loss: Callable[[Any, Any], Tensor] | None = None
    """loss(output, target): a scalar, the mean over the minibatch."""
    data: Callable[[], Data] | None = None
    """Builds the data sets; see `datasets`."""
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None
    """Builds the optimiser for some of the model's parameters; by default SGD, rate 0.01, momentum 0.9."""
    metric: Callable[[Any, Any], Tensor] | None = None
    """metric(output, target): how many samples of the minibatch are right; by default by argmax for class ids."""
    autocast: torch.dtype | None = None
    """`torch.bfloat16` to run the model and the loss under torch's autocast; parameters stay as they are."""
    name: str = ""
    minibatch: int = 32
    """Samples in a minibatch, unless the command line says otherwise."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise LaunchError(f"a job's model must be a torch.nn.Module, not {type(self.model).__name__}")
        precision.check(self.autocast)
        if self.minibatch < 1:
            raise LaunchError(f"a job's minibatch must be at least 1, not {self.minibatch}")
        if self.inputs is None and self.data is None:
            raise LaunchError(
                "a job needs example inputs or data, as in Job(model, inputs=lambda n: torch.randn(n, 3, 224, 224))"
            )

    @cached_property
    def datasets(self) -> Data:
        """The job's data sets, built when first asked for."""
        if self.data is None:
            raise LaunchError(f"the job {self.name!r} has no data: give it a `data` that returns pipeplan_launch.Data")
        made = self.data()
        if not isinstance(made, Data):
            raise LaunchError(f"the job's `data` must return pipeplan_launch.Data, not {type(made).__name__}")
        return made

    def example_inputs(self, minibatch: int) -> tuple[Tensor, ...]:
        """The model's inputs for a minibatch of that many samples."""
        if self.inputs is None:
            return self.example_batch(minibatch).inputs
        return _as_inputs(self.inputs(minibatch), "the job's `inputs`")

    def example_batch(self, minibatch: int) -> Batch:
        """The first samples of the training data, repeated where there are too few; else the inputs alone."""
        if self.data is None:
            return Batch(self.example_inputs(minibatch), None)
        train: Any = self.datasets.train
        if len(train) == 0:
            raise LaunchError("the job's training data is empty")
        return collate([train[index % len(train)] for index in range(minibatch)])

    def make_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The job's optimiser over these parameters."""
        if self.optimizer is None:
            return SGD(parameters, lr=0.01, momentum=0.9)
        made = self.optimizer(parameters)
        if not isinstance(made, Optimizer):
            raise LaunchError(f"the job's `optimizer` must return a torch optimiser, not {type(made).__name__}")
        return made

    def correct(self, output: Any, target: Any) -> Tensor | None:
        """How many samples of the minibatch are right, or None where that is not known."""
        if self.metric is not None:
            return self.metric(output, target)
        if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
            return None
        if target.is_floating_point() or output.ndim != target.ndim + 1 or output.shape[0] != target.shape[0]:
            return None
        return (output.argmax(dim=1) == target).reshape(len(target), -1).all(dim=1).sum()


def collate(samples: Sequence[Any]) -> Batch:
    """Stack samples `(input or tuple of inputs, target)` into a minibatch."""
    stacked = default_collate(list(samples))
    if not isinstance(stacked, list | tuple) or len(stacked) != 2:
        raise LaunchError("a sample of the job's data must be a pair (input, target)")
    return Batch(_as_inputs(stacked[0], "the input of a sample of the job's data"), stacked[1])


def _as_inputs(value: Any, whence: str) -> tuple[Tensor, ...]:
    inputs = (value,) if isinstance(value, Tensor) else value
    if not isinstance(inputs, list | tuple) or not inputs or not all(isinstance(one, Tensor) for one in inputs):
        raise LaunchError(f"{whence} must be a tensor or a tuple of tensors, not {type(value).__name__}")
    return tuple(inputs)


def repeat_to(example: Tensor, minibatch: int) -> Tensor:
    """`minibatch` samples by repeating those of an example along dimension 0."""
    return example[torch.arange(minibatch) % len(example)]
