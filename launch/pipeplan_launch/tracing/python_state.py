"""Plain attributes of a model's modules, and of objects in these modules: numbers, tensors, lists, dictionaries.

A snapshot finds the attributes that a forward pass changed, and restores them.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
ABSENT = object()
"""The value of an attribute that does not exist."""
GENERATORS = (torch.Generator, random.Random)
_LIBRARIES = {"torch", "numpy", "pipeplan_launch", *sys.stdlib_module_names} - {"__main__"}


@dataclass(frozen=True)
class Attribute:
    """An attribute of a module, or of an object that a module holds."""

    owner: Any
    name: str

    @property
    def value(self) -> Any:
        """The present value, which may be a default of the class."""
        return vars(self.owner).get(self.name, getattr(type(self.owner), self.name, ABSENT))

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attribute) and self.owner is other.owner and self.name == other.name


class Snapshot:
    """The buffers and plain attributes of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owners = list(_owners(model))
        self._attributes = {owner: _kept_attributes(owner.it) for owner in self._owners}
        self._buffers = {module: dict(module._buffers) for module in model.modules()}
        self._values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def changed(self) -> list[Attribute]:
        """The attributes that are new or have changed."""
        found = []
        for owner in self._owners:
            before = self._attributes[owner]
            now = {name: value for name, value in vars(owner.it).items() if name not in INTERNAL}
            for name in dict.fromkeys((*before, *now)):
                kept = before.get(name)
                if kept is None or name not in now or not kept.is_same(now[name]):
                    found.append(Attribute(owner.it, name))
        return found

    def restore(self) -> None:
        """Restore buffers and attributes."""
        self.restore_buffers()
        for owner in self._owners:
            before = self._attributes[owner]
            for name in [name for name in vars(owner.it) if name not in INTERNAL and name not in before]:
                del vars(owner.it)[name]
            for name, kept in before.items():
                vars(owner.it)[name] = kept.restored()

    def restore_buffers(self) -> None:
        """Restore only the buffers."""
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.copy_(value)
        for module, buffers in self._buffers.items():
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def restored_state(model: nn.Module) -> Iterator[Snapshot]:
    """Context after which the parameters, buffers and plain attributes of the model are restored, and so are the random
    generators of Python and NumPy. Yields the snapshot of the attributes.

    A parameter is copied only if something writes to it, just before that.
    """
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    before = Snapshot(model)
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        with torch.compiler.set_stance("force_eager"), _ParameterWrites(model) as writes:
            yield before
    finally:
        for parameter, data in parameters:
            parameter.data = data
        writes.undo()
        before.restore()
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


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


@dataclass(frozen=True, eq=False)
class _Owner:
    """An object with attributes. It is hashed by identity, because a user's object may not be hashable."""

    it: Any


def _owners(model: nn.Module) -> Iterator[_Owner]:
    """The modules of a model, and the objects with plain attributes that they hold, each once."""
    waiting: list[Any] = list(model.modules())
    seen = set(map(id, waiting))
    while waiting:
        owner = waiting.pop(0)
        yield _Owner(owner)
        for name, value in vars(owner).items():
            if name in INTERNAL:
                continue
            for held in _members(value):
                if _has_plain_attributes(held) and id(held) not in seen:
                    seen.add(id(held))
                    waiting.append(held)


def _members(value: Any) -> list[Any]:
    """A value, or what it contains if it is a short container."""
    if isinstance(value, dict):
        return list(value.values()) if len(value) < 1000 else []
    if isinstance(value, list | tuple | set | deque):
        return list(value) if len(value) < 1000 else []
    return [value]


def _has_plain_attributes(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, nn.Module | type | Tensor) or kind.__module__.partition(".")[0] in _LIBRARIES:
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not callable(value)


def _kept_attributes(owner: Any) -> dict[str, _Kept]:
    return {name: _Kept(value) for name, value in vars(owner).items() if name not in INTERNAL}


class _Kept:
    """A value with its contents."""

    def __init__(self, value: Any, depth: int = 0) -> None:
        self._value = value
        self._contents: Any = None
        if isinstance(value, Tensor):
            self._contents = value.detach().clone()
        elif isinstance(value, GENERATORS):
            self._contents = _state_of(value)
        elif isinstance(value, dict) and depth < 4:
            self._contents = {key: _Kept(member, depth + 1) for key, member in value.items()}
        elif isinstance(value, list | tuple | deque) and depth < 4:
            self._contents = [_Kept(member, depth + 1) for member in value]
        elif isinstance(value, set):
            self._contents = set(value)
        elif _is_array(value):
            self._contents = value.copy()

    def restored(self) -> Any:
        """The value, with its earlier contents."""
        value, contents = self._value, self._contents
        if isinstance(value, Tensor):
            if not _is_equal(value, contents):
                with torch.no_grad():
                    value.copy_(contents)
        elif isinstance(value, torch.Generator):
            value.set_state(contents)
        elif isinstance(value, random.Random):
            value.setstate(contents)
        elif contents is None:
            pass
        elif isinstance(value, dict):
            kept = {key: member.restored() for key, member in contents.items()}
            value.clear()
            value.update(kept)
        elif isinstance(value, list | deque):
            kept_members = [member.restored() for member in contents]
            value.clear()
            value.extend(kept_members)
        elif isinstance(value, tuple):
            for member in contents:
                member.restored()
        elif isinstance(value, set):
            value.clear()
            value.update(contents)
        elif _is_array(value):
            value[...] = contents
        return value

    def is_same(self, now: Any) -> bool:
        """Whether a value equals the earlier value."""
        value, contents = self._value, self._contents
        if type(value) is not type(now):
            return False
        if isinstance(value, Tensor):
            return _is_equal(now, contents)
        if isinstance(value, GENERATORS):
            state = _state_of(now)
            return _is_equal(state, contents) if isinstance(state, Tensor) else bool(state == contents)
        if isinstance(value, bool | int | float | complex | str | bytes):
            return bool(value == now) or (value != value and now != now)
        if contents is None:
            return value is now
        if isinstance(value, dict):
            return contents.keys() == now.keys() and all(contents[key].is_same(now[key]) for key in contents)
        if isinstance(value, list | tuple | deque):
            return len(contents) == len(now) and all(
                one.is_same(other) for one, other in zip(contents, now, strict=True)
            )
        if isinstance(value, set):
            return bool(contents == now)
        return bool(contents.shape == now.shape) and contents.tobytes() == now.tobytes()


def _state_of(generator: Any) -> Any:
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit by bit. Tensors without data are equal if their shapes are."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.is_meta or one.is_sparse:
        return True
    return bool(torch.equal(one, other)) or bool(((one == other) | ((one != one) & (other != other))).all())
