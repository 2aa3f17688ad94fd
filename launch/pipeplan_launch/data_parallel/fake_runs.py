"""Runs of the user's module on fake tensors, to learn which inputs it takes and which parameters it writes.

They have shapes and no data, so neither time nor memory depends on the size of the model. A model that cannot run so,
such as one that branches on values, is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan_launch.job.autocast import autocast
from pipeplan_launch.job.job import Job, call_model
from pipeplan_launch.runtime.nested_tensors import tensors_in


def takes_any_size(job: Job, minibatch: int) -> bool:
    """Whether the last minibatches of the job's training and test data, if they are short, can run as they are."""
    rests = {
        (len(data) % minibatch, training)  # type: ignore[arg-type]
        for data, training in ((job.datasets.train, True), (job.datasets.test, False))
        if hasattr(data, "__len__")
    }
    short = [(rest, training) for rest, training in rests if rest]
    return all(_runs(job, rest, training) for rest, training in short) or not _runs(job, minibatch, True)


def written_parameters(job: Job, minibatch: int) -> list[str]:
    """The names of the parameters that the model's forward pass writes in training, such as weights that it clips."""
    writes = _Writes()
    _runs(job, minibatch, True, writes)
    return writes.names


def _runs(job: Job, samples: int, training: bool, writes: _Writes | None = None) -> bool:
    """Whether the model runs forward on so many samples, with fake tensors. `writes` notes what it writes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = job.model
    with torch.random.fork_rng(devices=[]):
        example = job.example_batch(samples)
        parameters = {name: mode.from_tensor(tensor) for name, tensor in model.named_parameters()}
        state = parameters | {name: mode.from_tensor(tensor) for name, tensor in model.named_buffers()}
        inputs = [mode.from_tensor(tensor) for tensor in example.inputs]
        if writes is not None:
            writes.observe(parameters)
        try:
            with (
                _mode(model, training),
                mode,
                torch.no_grad(),
                autocast(job.autocast, torch.device("cpu")),
                writes or nullcontext(),
            ):
                call_model(_Replaced(model, state), inputs, example.names)
        except Exception:
            return False
    return True


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which parameters an operator writes, by their memory: writes through `.data` have no other trace."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._name_of: dict[int, str] = {}

    def observe(self, parameters: Mapping[str, Tensor]) -> None:
        """Note writes into these parameters."""
        self._name_of = {one.untyped_storage()._cdata: name for name, one in parameters.items()}

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                storages = [tensor.untyped_storage()._cdata for tensor in tensors_in(value)]
                self.names += [self._name_of[one] for one in storages if one in self._name_of]
        return function(*args, **(kwargs or {}))


class _Replaced(nn.Module):
    """A model that is called with other parameters and buffers in place of its own."""

    def __init__(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
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
