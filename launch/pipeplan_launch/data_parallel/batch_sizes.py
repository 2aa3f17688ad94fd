"""Whether the user's module takes minibatches of another size, as the last one of an epoch may have.

It is run on fake tensors, which have shapes and no data, so neither time nor memory depends on the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeplan_launch.job.autocast import autocast
from pipeplan_launch.job.job import Job, call_model


def takes_any_size(job: Job, minibatch: int) -> bool:
    """Whether the last minibatches of the job's training and test data, if they are short, can run as they are.

    A model that cannot run on fake tensors at all, such as one that branches on values, is trusted to take any size.
    """
    rests = {
        (len(data) % minibatch, training)  # type: ignore[arg-type]
        for data, training in ((job.datasets.train, True), (job.datasets.test, False))
        if hasattr(data, "__len__")
    }
    short = [(rest, training) for rest, training in rests if rest]
    return all(_runs(job, rest, training) for rest, training in short) or not _runs(job, minibatch, True)


def _runs(job: Job, samples: int, training: bool) -> bool:
    """Whether the model runs forward on so many samples, with fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = job.model
    with torch.random.fork_rng(devices=[]):
        example = job.example_batch(samples)
        state = {name: mode.from_tensor(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        inputs = [mode.from_tensor(tensor) for tensor in example.inputs]
        try:
            with _mode(model, training), mode, torch.no_grad(), autocast(job.autocast, torch.device("cpu")):
                call_model(_Replaced(model, state), inputs, example.names)
        except Exception:
            return False
    return True


class _Replaced(nn.Module):
    """A model that is called with other parameters and buffers in place of its own."""

    def __init__(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._given = (model, state)  # in a tuple, so that the model does not become a child

    def forward(self, *arguments: object, **named: object) -> object:
        """The model's output."""
        model, state = self._given
        return torch.func.functional_call(model, dict(state), arguments, named)


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Context in training or evaluation mode. Afterwards every submodule has its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was
