"""Everything in a job that a pass may change: parameters, buffers, and what Python code keeps in attributes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch.runtime.self_check.kept_values import (
    CONSTANTS,
    FunctionState,
    Kept,
    hooks_of,
    is_users_class,
    keep,
)
from pipeplan_launch.tracing.trace import TracedModel

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
MODEL, LOSS = "model", "loss"


@dataclass(frozen=True)
class AttributeName:
    """An attribute of a module, of one of the user's classes, or a global variable of one of their files."""

    owner: str
    """Path of the module, beginning with `model` or `loss`; or a readable name of the class or file."""
    name: str
    kind: type | None = None
    """Class of the owner; None for a file."""


class TrainedModules:
    """The modules of a job whose state is compared: the model, and those that the loss calls."""

    def __init__(self, traced: TracedModel, loss: object) -> None:
        self.loss = loss
        self.roots: dict[str, nn.Module] = {MODEL: traced.model}
        if traced.loss_state is not None:
            self.roots[LOSS] = traced.loss_state.module
        elif isinstance(loss, nn.Module):
            self.roots[LOSS] = loss
        self.modules: dict[str, nn.Module] = {}
        for root, top in self.roots.items():
            for path, module in top.named_modules():
                self.modules[f"{root}.{path}" if path else root] = module
        self.parameters = self._named("named_parameters")
        self.tensors = self.present()
        """The parameters and buffers that the modules held at first, by their first names."""

    def _named(self, method: str) -> dict[str, Tensor]:
        """Tensors of all modules by their first names."""
        named: dict[int, tuple[str, Tensor]] = {}
        for root, top in self.roots.items():
            for name, tensor in getattr(top, method)():
                named.setdefault(id(tensor), (f"{root}.{name}", tensor))
        return dict(named.values())

    def present(self) -> dict[str, Tensor]:
        """The parameters and buffers that the modules hold now. Code may have replaced some since the start."""
        return {**self._named("named_parameters"), **self._named("named_buffers")}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by their first names."""
        return {
            name: parameter
            for name, parameter in self.parameters.items()
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad
        }

    def attributes(self) -> dict[AttributeName, Any]:
        """The present values of all attributes that user code may keep state in."""
        found: dict[AttributeName, Any] = {}
        for path, module in self.modules.items():
            if type(module).__module__.partition(".")[0] == "torch":
                continue
            for name, value in vars(module).items():
                if name not in _OF_EVERY_MODULE:
                    found[AttributeName(path, name, type(module))] = value
        for kind in self._user_classes():
            for name, value in vars(kind).items():
                if _is_state(name, value):
                    found[AttributeName(f"class {kind.__name__}", name, kind)] = value
            file = sys.modules[kind.__module__]
            for name, value in vars(file).items():
                if _is_state(name, value):
                    found[AttributeName(f"file {file.__name__}", name)] = value
        return found

    def _user_classes(self) -> list[type]:
        kinds = dict.fromkeys(kind for module in self.modules.values() for kind in type(module).__mro__)
        return [kind for kind in kinds if is_users_class(kind)]

    def owner(self, attribute: AttributeName) -> Any:
        """The object that has this attribute."""
        if attribute.owner in self.modules:
            return self.modules[attribute.owner]
        if attribute.kind is not None:
            return attribute.kind
        return sys.modules[attribute.owner.removeprefix("file ")]


def _is_state(name: str, value: object) -> bool:
    """Whether an attribute of a class, or a global variable, may be state. Functions, classes and large objects are
    not.
    """
    if name.startswith("__"):
        return False
    if isinstance(value, Tensor):
        return value.numel() <= 1000
    if isinstance(value, (list, dict, set)):
        return len(value) <= 100 and all(isinstance(member, CONSTANTS) for member in value)
    return isinstance(value, (*CONSTANTS, torch.Generator))


@dataclass(frozen=True)
class Attributes:
    """The state of a job's Python code at one moment."""

    modules: TrainedModules
    values: dict[AttributeName, Kept]
    of_functions: FunctionState
    """The state of the loss and of the hooks of parameters, which is restored, but not compared."""

    @staticmethod
    def now(modules: TrainedModules) -> Attributes:
        """The present values."""
        functions = FunctionState([modules.loss, *hooks_of(modules.parameters)])
        return Attributes(modules, {name: keep(value) for name, value in modules.attributes().items()}, functions)

    def restore(self) -> None:
        """Bring the attributes back to these values."""
        self.of_functions.restore()
        for name in self.modules.attributes().keys() - self.values.keys():
            delattr(self.modules.owner(name), name.name)
        for name, kept in self.values.items():
            value, owner = kept.restore(), self.modules.owner(name)
            if vars(owner).get(name.name, self) is not value:
                _set(owner, name.name, value)


@dataclass(frozen=True)
class TrainingState:
    """The state of a job's modules at one moment."""

    modules: TrainedModules
    tensors: dict[str, Tensor]
    """Copies of all parameters and buffers."""
    attributes: Attributes
    _held: list[tuple[dict[str, Any], dict[str, Any]]] = field(repr=False)
    """Every module's dictionaries of parameters and of buffers, and the tensors that were in them."""
    _gradients: list[tuple[Tensor, Tensor | None]] = field(repr=False)

    @staticmethod
    def now(modules: TrainedModules) -> TrainingState:
        """The present state."""
        tensors = {name: tensor.detach().clone() for name, tensor in modules.tensors.items()}
        held = [
            (held, dict(held)) for module in modules.modules.values() for held in (module._parameters, module._buffers)
        ]
        gradients = [(parameter, parameter.grad) for parameter in modules.parameters.values()]
        return TrainingState(modules, tensors, Attributes.now(modules), held, gradients)

    def restore(self) -> None:
        """Bring everything back to this state."""
        for present, tensors in self._held:
            present.clear()
            present.update(tensors)
        self.adopt(self.tensors)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self.attributes.restore()

    def changed(self) -> dict[str, Tensor]:
        """Copies of the parameters and buffers whose values have changed since this state.

        A buffer that was replaced by another tensor counts with that tensor's value.
        """
        return {
            name: tensor.detach().clone()
            for name, tensor in self.modules.present().items()
            if name in self.tensors and not same_bits(tensor, self.tensors[name])
        }

    def adopt(self, values: Mapping[str, Tensor]) -> None:
        """Write these values into the parameters and buffers, which are the same objects as at first."""
        with torch.no_grad():
            for name, value in values.items():
                put(self.modules.tensors[name], value)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, nn.Module):
        vars(owner)[name] = value  # nn.Module would register a parameter
    else:
        setattr(owner, name, value)


def put(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor this value, and its shape if that has changed."""
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        tensor.data = value.clone()
    elif not same_bits(tensor, value):
        tensor.detach().copy_(value)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type and values; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())
