"""The user's own module as the only stage of a plan: the part of a stage that the engines need, without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job, call_model
from pipeplan_launch.job.loss import loss_state
from pipeplan_launch.job.nested_tensors import own_part, tensors_in
from pipeplan_launch.job.pass_conditions import autocast
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.tracing.split import StateDictNames


class Whole(nn.Module):
    """Holds the model and the modules of its loss. The forward pass runs a function on these modules.

    So DDP and FSDP2 see one module with one forward pass, and the loss may have parameters too.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, run: Callable[[], Any]) -> Any:
        """The result of `run`."""
        return run()


class ModuleProgram:
    """A `pipeplan_launch.tracing.subgraph.Program` that calls the user's own module."""

    def __init__(self, job: Job, device: torch.device) -> None:
        """Raises `LaunchError` for a loss with a trained tensor that belongs to no module."""
        self.model = job.model
        self.loss_state = loss_state(job.loss, job.model)
        self.whole = Whole(job.model, *([] if self.loss_state is None else [self.loss_state.module]))
        self.receives: Sequence[Any] = ()
        self.sends: Sequence[Any] = ()
        self.shared: Mapping[str, tuple[int, ...]] = {}
        self._device, self._autocast = device, job.autocast
        with torch.random.fork_rng(devices=[]):
            example = job.example(1)
        self._input_names = example.names
        self.model_inputs: Sequence[int] = range(len(example.inputs))
        self.naming = _naming(job.model)
        self.unread = {name for name, _ in job.model.named_buffers()} - set(self.naming.state_dict.values())
        """Buffers that are not in the state_dict. A checkpoint of another engine may lack them."""
        self.model.train()

    def to_device(self) -> None:
        """Move the model and the loss to the worker's device."""
        self.whole.to(self._device)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The parameters of the model and of the loss, each under its first name."""
        return dict(self.model.named_parameters()) | ({} if self.loss_state is None else self.loss_state.parameters())

    def buffers_by_name(self) -> dict[str, Tensor]:
        """The buffers of the model and of the loss, each under its first name."""
        return dict(self.model.named_buffers()) | ({} if self.loss_state is None else self.loss_state.buffers())

    def changing_state(self) -> dict[str, Tensor]:
        """Everything that a forward pass may write except trained parameters: buffers and frozen parameters."""
        frozen = {name: one for name, one in self.parameters_by_name().items() if not one.requires_grad}
        return self.buffers_by_name() | frozen

    def frozen_sums(self) -> dict[str, complex]:
        """The sum of the elements of every frozen parameter. If a sum changes, the parameter has been written."""
        parameters = self.parameters_by_name()
        return {
            name: complex(own_part(one.detach()).sum().item())
            for name, one in parameters.items()
            if not one.requires_grad
        }

    @contextmanager
    def preserved(self, names: Collection[str]) -> Iterator[None]:
        """Context after which these tensors of `changing_state` get their earlier values back."""
        before = {name: tensor.detach().clone() for name, tensor in self.changing_state().items() if name in names}
        try:
            yield
        finally:
            with torch.no_grad():
                present = self.changing_state()
                for name, value in before.items():
                    present[name].copy_(value)

    def call(
        self, _parameters: Mapping[str, Tensor], _received: Sequence[Tensor], inputs: Sequence[Tensor], _batch: int
    ) -> Any:
        """The model's output for these inputs. The module always uses its own parameters."""
        with autocast(self._autocast, self._device):
            return call_model(self.model, inputs, self._input_names)

    def train(self, mode: bool = True) -> ModuleProgram:
        """Set training or evaluation mode of the model. The loss keeps its own mode."""
        self.model.train(mode)
        return self

    def eval(self) -> ModuleProgram:
        """Set evaluation mode."""
        return self.train(False)


def _naming(model: nn.Module) -> StateDictNames:
    """Maps every name in the model's state_dict to the first name of the same tensor."""
    first: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        first.setdefault(id(tensor), name)
    kept = model.state_dict(keep_vars=True)
    return StateDictNames({name: first[id(value)] for name, value in kept.items() if id(value) in first})


# Runs of a copy of the user's module on fake tensors, to learn which inputs it takes and which parameters it writes.
#
# Fake tensors have shapes and no data, so neither time nor memory depends on the size of the model. A model that
# branches on values cannot run on them.


def takes_any_size(job: Job, minibatch: int) -> bool:
    """Whether the model can run on the last minibatches of the job's training and test data, if these are short.

    Returns True for a model that cannot run on fake tensors.
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

    Under FSDP2 a forward pass would write to a copy of the parameter that is dropped later. All workers must exchange
    the gradients of the same parameters.
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
    """The error of the pass, or None."""
    written: tuple[str, ...]
    """Names of the parameters that the pass has written, or moved to other memory."""


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
    """Notes the memory that operators write. Writes through `.data` cannot be seen in any other way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: set[int] = set()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.memory.update(map(_memory, tensors_in(value)))
        return function(*args, **(kwargs or {}))
