"""The user's own module as the only stage of a plan: the part of a stage that the engines need, without a trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch.job.autocast import autocast
from pipeplan_launch.job.job import Job, call_model
from pipeplan_launch.job.loss_state import loss_state
from pipeplan_launch.runtime.nested_tensors import own_part
from pipeplan_launch.tracing.split import StateDictNames


class Whole(nn.Module):
    """Holds the model and the modules of its loss. Its forward pass runs a function of them.

    DDP and FSDP2 see one module with one forward pass, in which the loss may use parameters of its own.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, run: Callable[[], Any]) -> Any:
        """The result of `run`."""
        return run()


class ModuleProgram:
    """A `pipeplan_launch.tracing.stage_program.Program` that calls the user's own module."""

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
        """Buffers outside of the state_dict, which a checkpoint of another engine may lack."""
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
        """All that a forward pass may write besides trained parameters: buffers and frozen parameters."""
        frozen = {name: one for name, one in self.parameters_by_name().items() if not one.requires_grad}
        return self.buffers_by_name() | frozen

    def frozen_sums(self) -> dict[str, complex]:
        """The sum of the elements of every frozen parameter, which tells whether something has written it."""
        parameters = self.parameters_by_name()
        return {
            name: complex(own_part(one.detach()).sum().item())
            for name, one in parameters.items()
            if not one.requires_grad
        }

    @contextmanager
    def preserved(self, names: Collection[str]) -> Iterator[None]:
        """Context after which these tensors of `changing_state` have their present values again."""
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
        """The model's output for these inputs. The module uses its own parameters, whatever is given."""
        with autocast(self._autocast, self._device):
            return call_model(self.model, inputs, self._input_names)

    def train(self, mode: bool = True) -> ModuleProgram:
        """Set training or evaluation mode of the model. The loss keeps its own."""
        self.model.train(mode)
        return self

    def eval(self) -> ModuleProgram:
        """Set evaluation mode."""
        return self.train(False)


def _naming(model: nn.Module) -> StateDictNames:
    """For every name in the model's state_dict, the first name of the same tensor."""
    first: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        first.setdefault(id(tensor), name)
    kept = model.state_dict(keep_vars=True)
    return StateDictNames({name: first[id(value)] for name, value in kept.items() if id(value) in first})
