"""The state of a job that a pass may change: parameters, buffers, and attributes that Python code sets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch.job.hooks import parameter_hooks
from pipeplan_launch.job.kept_values import Attributes, put, same_bits
from pipeplan_launch.job.user_code import is_users_class
from pipeplan_launch.tracing.trace import TracedModel

MODEL, LOSS = "model", "loss"


class TrainedModules:
    """The modules of a job whose state is compared: the model, and the modules that the loss calls."""

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

    def attributes(self) -> Attributes:
        """The present attributes of the modules and of the user's classes, and the global variables of their files.

        The state of the loss and of the hooks of parameters is restored with them, but not compared.
        """
        own = [one for one in self.modules.values() if type(one).__module__.partition(".")[0] != "torch"]
        classes = dict.fromkeys(kind for module in self.modules.values() for kind in type(module).__mro__)
        users = [kind for kind in classes if is_users_class(kind)]
        files = dict.fromkeys(sys.modules[kind.__module__] for kind in users)
        hooks = [hook for hooks in parameter_hooks(self.parameters).values() for hook in hooks.values()]
        return Attributes([*own, *users, *files], [self.loss, *hooks])


class TrainingState:
    """The state of a job's modules at one moment."""

    def __init__(self, modules: TrainedModules) -> None:
        self._modules, self.attributes = modules, modules.attributes()
        self.tensors = {name: tensor.detach().clone() for name, tensor in modules.tensors.items()}
        """Copies of all parameters and buffers."""
        every = modules.modules.values()
        held: list[dict[str, Any]] = [held for one in every for held in (one._parameters, one._buffers)]
        self._held = [(one, dict(one)) for one in held]
        """Every module's dictionaries of parameters and of buffers, and the tensors that were in them."""
        self._gradients = [(parameter, parameter.grad) for parameter in modules.parameters.values()]

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
            for name, tensor in self._modules.present().items()
            if name in self.tensors and not same_bits(tensor, self.tensors[name])
        }

    def adopt(self, values: Mapping[str, Tensor]) -> None:
        """Write these values into the parameters and buffers that the modules held at first."""
        with torch.no_grad():
            for name, value in values.items():
                put(self._modules.tensors[name], value)
