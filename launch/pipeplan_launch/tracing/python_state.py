"""State that a forward pass may change: a model's buffers, and plain attributes of its modules and of their objects.

A snapshot finds the attributes that a forward pass changed, and restores them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeplan_launch.job.kept_values import Attributes
from pipeplan_launch.job.pass_conditions import RandomState
from pipeplan_launch.job.reachable import INTERNAL

_LIBRARIES = {"torch", "numpy", "pipeplan_launch", *sys.stdlib_module_names} - {"__main__"}
MOST_MEMBERS = 1_000_000
"""Largest container of a module that is copied."""


class Snapshot(Attributes):
    """The buffers and plain attributes of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(_owners(model), fields=False, most=MOST_MEMBERS)
        self._buffers = {module: dict(module._buffers) for module in model.modules()}
        self._contents = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        """Restore buffers and attributes."""
        self.restore_buffers()
        super().restore()

    def restore_buffers(self) -> None:
        """Restore only the buffers."""
        with torch.no_grad():
            for buffer, value in self._contents:
                buffer.copy_(value)
        for module, buffers in self._buffers.items():
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def restored_state(model: nn.Module) -> Iterator[Snapshot]:
    """Context after which the parameters, buffers and plain attributes of the model are restored, and so are the random
    generators of Python, NumPy and torch. Yields the snapshot of the attributes.

    A parameter is copied only if something writes to it, just before that.
    """
    random_state, before = RandomState.now(torch.device("cpu")), Snapshot(model)
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        with torch.compiler.set_stance("force_eager"), _ParameterWrites(model) as writes:
            yield before
    finally:
        for parameter, data in parameters:
            parameter.data = data
        writes.undo()
        before.restore()
        random_state.restore()


class _ParameterWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a parameter before an operator writes to it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = {_storage(parameter): parameter.data for parameter in model.parameters()}
        self._before: dict[int, Tensor] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator._schema.is_mutable:
            for tensor in tree_leaves((args, kwargs)):
                storage = _storage(tensor) if isinstance(tensor, Tensor) else 0
                if storage in self._memory and storage not in self._before:
                    self._before[storage] = self._memory[storage].clone()
        return operator(*args, **(kwargs or {}))

    def undo(self) -> None:
        """Restore the parameters from the copies."""
        for storage, value in self._before.items():
            self._memory[storage].copy_(value)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _owners(model: nn.Module) -> list[Any]:
    """The modules of a model, and the objects with plain attributes that they hold, each once."""
    found: list[Any] = list(model.modules())
    seen = set(map(id, found))
    for owner in found:  # the loop appends to `found`
        for name, value in vars(owner).items():
            for held in () if name in INTERNAL else _members(value):
                if _has_plain_attributes(held) and id(held) not in seen:
                    seen.add(id(held))
                    found.append(held)
    return found


def _members(value: Any) -> list[Any]:
    """The members of a short container; [] for a long one; any other value alone."""
    if isinstance(value, dict | list | tuple | set | deque):
        members = value.values() if isinstance(value, dict) else value
        return list(members) if len(value) < 1000 else []
    return [value]


def _has_plain_attributes(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, nn.Module | type | Tensor) or kind.__module__.partition(".")[0] in _LIBRARIES:
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not callable(value)
