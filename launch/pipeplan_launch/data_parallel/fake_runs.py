"""Runs of a copy of the user's module on fake tensors, to learn which inputs it takes and which parameters it writes.

They have shapes and no data, so neither time nor memory depends on the size of the model. A model that branches on
values cannot run so.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.autocast import autocast
from pipeplan_launch.job.job import Job, call_model
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.runtime.nested_tensors import tensors_in


def takes_any_size(job: Job, minibatch: int) -> bool:
    """Whether the last minibatches of the job's training and test data, if they are short, can run as they are.

    A model that cannot run on fake tensors at all is trusted.
    """
    rests = {
        (len(data) % minibatch, training)  # type: ignore[arg-type]
        for data, training in ((job.datasets.train, True), (job.datasets.test, False))
        if hasattr(data, "__len__")
    }
    short = [_run(job, rest, training) for rest, training in rests if rest]
    return all(run.problem is None for run in short) or _run(job, minibatch, True).problem is not None


def refuse_written_parameters(job: Job, minibatch: int) -> None:
    """Raise `LaunchError` unless the forward pass uses the same parameters for all inputs, and writes none of them.

    Under FSDP2 a gathered parameter is a copy that is dropped, and workers exchange the gradients of the same
    parameters.
    """
    run = _run(job, minibatch, True)
    if run.problem is not None:
        raise LaunchError(
            f"the model does not run on tensors without values ({run.problem}), so it may use other weights on each "
            "worker, which FSDP does not allow: solve for a plan without FSDP"
        )
    if run.written:
        raise LaunchError(
            f"forward() changes the parameter {run.written[0]!r}, and under FSDP it has a copy that is dropped: solve "
            "for a plan without FSDP, or change the weights after each update, in an optimiser of your own"
        )


@dataclass(frozen=True)
class _Run:
    """A forward pass on fake tensors."""

    problem: str | None
    """Its error, or None."""
    written: tuple[str, ...]
    """Names of the parameters that it has written, or given other memory."""


def _run(job: Job, samples: int, training: bool) -> _Run:
    mode, writes = FakeTensorMode(allow_non_fake_inputs=True), _Writes()
    with torch.random.fork_rng(devices=[]):
        example = job.example_batch(samples)
        try:
            with FakeCopyMode(mode):
                model = copy.deepcopy(job.model).train(training)
            before = {name: _memory(one) for name, one in model.named_parameters()}
            inputs = [mode.from_tensor(tensor) for tensor in example.inputs]
            with mode, torch.no_grad(), autocast(job.autocast, torch.device("cpu")), writes:
                call_model(model, inputs, example.names)
        except Exception as error:
            return _Run(describe_error(error), ())
    moved = {name for name, one in model.named_parameters() if _memory(one) != before[name]}
    return _Run(None, tuple(name for name, memory in before.items() if name in moved or memory in writes.memory))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory that operators write: writes through `.data` have no other trace."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: set[int] = set()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.memory.update(map(_memory, tensors_in(value)))
        return function(*args, **(kwargs or {}))
