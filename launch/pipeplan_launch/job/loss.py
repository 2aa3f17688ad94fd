"""The loss of a job: its value, the weight of a minibatch in means, and its own parameters and buffers.

The last stage trains and saves the loss's tensors together with its layers' tensors. The loss may be a module, a
method of a module, or a function that closes over modules. The names of its tensors begin with `loss.`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.pass_conditions import module_mode
from pipeplan_launch.job.reachable import reachable_values


def loss_text(loss: object) -> str:
    """The name of the job's loss for messages, such as `the job's loss (cross_entropy)`."""
    called = loss
    while isinstance(called, functools.partial):
        called = called.func
    name = getattr(called, "__qualname__", None) or type(called).__qualname__
    name = name.rpartition("<locals>.")[2]
    code = getattr(called, "__code__", None)
    place = f" of {code.co_filename}:{code.co_firstlineno}" if name == "<lambda>" and code is not None else ""
    return f"the job's loss ({name.strip('<>')}{place})"


def checked_loss(loss: object, value: object) -> Tensor:
    """The value that a loss has returned, to start a backward pass from.

    Raises `LaunchError` unless it is a tensor with one real number.
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        raise LaunchError(
            f"{loss_text(loss)} must return a tensor with one number, the mean over the minibatch, not "
            f"{_described(value)}"
        )
    return value


def loss_number(loss: object, value: object) -> float:
    """The value of a loss in evaluation as a number. Raises `LaunchError` unless it is a scalar tensor or a number."""
    if isinstance(value, int | float):
        return float(value)
    return float(checked_loss(loss, value))


def constant_loss_message(loss: object) -> str:
    """The error message for a loss that depends on no trained parameter."""
    return f"{loss_text(loss)} does not depend on any parameter that can be trained"


def _described(value: Any) -> str:
    """A description of a value that is not a loss, with advice if there is any."""
    if not isinstance(value, Tensor):
        return f"a value of type {type(value).__name__}"
    if value.is_complex():
        return f"{value.dtype}"
    advice = ": take the mean, as with reduction='mean'" if value.numel() > 1 else ""
    return f"one of shape {tuple(value.shape)}{advice}"


# The weight of a minibatch in the mean over the minibatches of an update, as the job's `loss_weight` counts it.


def weight_of(loss_weight: Callable[[Any], Any], target: Any) -> float:
    """The weight of a minibatch with this target. Raises `LaunchError` unless it is a number of at least 0."""
    with torch.no_grad():
        value = loss_weight(target)
    single = not isinstance(value, Tensor) or (value.numel() == 1 and not value.is_complex())
    if not single or not isinstance(value, Tensor | int | float):
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise LaunchError(f"the job's loss_weight must return one number, such as a count of targets, not {found}")
    weight = float(value)
    if not 0 <= weight < math.inf:
        raise LaunchError(f"the job's loss_weight must return a number of at least 0, not {weight:g}")
    return weight


LOSS_PREFIX = "loss."
"""Prefix of the names of the loss's tensors."""
REMEDY = "put the parameters in the model and return the loss from it, or in a module that is the job's loss"


class LossState:
    """The tensors of the modules that a job's loss calls, without those that belong to the model."""

    def __init__(self, loss: Any, modules: Mapping[str, nn.Module], model: nn.Module) -> None:
        """`modules`: the modules that the loss calls, by name. Raises `LaunchError` if names collide."""
        self._holder = _Holder(loss, modules)
        own_of_model = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        tensors = (*self._holder.named_parameters(), *self._holder.named_buffers())
        self._names = tuple(name for name, tensor in tensors if id(tensor) not in own_of_model)
        """Names of the loss's own tensors. Its module may also contain the model."""
        taken = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        clash = next((name for name in self._names if name in taken), None)
        if clash is not None:
            raise LaunchError(
                f"both the model and the job's loss have a tensor that is called {clash!r}: rename the model's module"
            )

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def module(self) -> nn.Module:
        """The module that the loss calls, or a module whose children are all the modules that it calls. Its tensors
        have the same names as here, but without the prefix `loss.`.
        """
        return self._holder.get_submodule(LOSS_PREFIX[:-1])

    def parameters(self) -> dict[str, nn.Parameter]:
        """The loss's parameters, by name."""
        return {name: one for name, one in self._holder.named_parameters() if name in self._names}

    def buffers(self) -> dict[str, Tensor]:
        """The loss's present buffers, by name. A loss may replace a buffer by assigning to it."""
        return {name: one for name, one in self._holder.named_buffers() if name in self._names}

    def call(self, tensors: Mapping[str, Tensor], output: Any, target: Any) -> Any:
        """The loss's value, with `tensors` in place of its own tensors of the same names."""
        own = {name: tensors[name] for name in self._names if name in tensors}
        return torch.func.functional_call(self._holder, own, (output, target))

    def evaluate(self, output: Any, target: Any) -> Any:
        """The loss's value in evaluation mode. Its buffers stay unchanged."""
        with module_mode(self._holder, train=False):
            return self.call({name: one.clone() for name, one in self.buffers().items()}, output, target)

    def to(self, device: torch.device) -> None:
        """Move the loss's modules to a device."""
        self._holder.to(device)

    def release(self) -> None:
        """Free the memory of the loss's tensors, in a worker that does not call the loss."""
        if len(self._names) == len([*self._holder.parameters(), *self._holder.buffers()]):  # it holds no model
            self._holder.to("meta")


class _Holder(nn.Module):
    """A module whose forward is the loss, and whose children are the modules that the loss calls."""

    def __init__(self, loss: Any, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._function = (loss,)  # in a tuple, because a module would become a child under this name
        several = nn.Module()
        for name, module in modules.items():
            several.add_module(name, module)
        self.add_module(LOSS_PREFIX[:-1], several if len(modules) > 1 else next(iter(modules.values())))

    def forward(self, output: Any, target: Any) -> Any:
        return self._function[0](output, target)


def loss_state(loss: Any, model: nn.Module) -> LossState | None:
    """The state of a job's loss; None if the loss has no state.

    Raises `LaunchError` for a trained tensor that belongs to no module, which can be neither trained nor saved.
    """
    if loss is None:
        return None
    modules: dict[str, nn.Module] = {}
    held: set[int] = {id(module) for module in model.modules()}
    known: set[int] = {id(parameter) for parameter in model.parameters()}
    loose: list[tuple[str, Tensor]] = []
    for path, value in reachable_values(loss):
        if isinstance(value, nn.Module) and id(value) not in held:
            modules[_unique(path, modules)] = value
            held.update(map(id, value.modules()))
            known.update(map(id, value.parameters()))
        elif isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            loose.append((path, value))
    for path, tensor in loose:
        if id(tensor) not in known:
            raise LaunchError(
                f"{loss_text(loss)} uses a tensor that is to be trained, {path!r}, and that is in no module: {REMEDY}"
            )
    state = LossState(loss, modules, model) if modules else None
    return state or None


def _unique(path: str, taken: Mapping[str, object]) -> str:
    """A name for a module of the loss: the last part of its path, with a number if needed to make it unique."""
    name = path.rpartition(".")[2] or "module"
    if hasattr(nn.Module, name):
        name += "_"
    number = sum(one == name or one.startswith(f"{name}-") for one in taken)
    return f"{name}-{number + 1}" if number else name
