"""State that a user's Python code keeps between two calls: how to copy it, compare it and restore it.

Code keeps state in attributes of modules, of other objects and of classes, in global variables, and in variables of an
enclosing function. The values are numbers, tensors, containers, random generators, and objects with such attributes.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeplan_launch.job.reachable import INTERNAL, reachable_values
from pipeplan_launch.job.user_code import is_user_code, is_users_class

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
MOST_MEMBERS = 10_000
"""Largest container that is copied. Larger containers hold data, and would take long to copy."""
MOST_DEPTH = 8
UNKNOWN = object()
"""The content of a value that is not copied."""
ABSENT = object()
"""The value of an attribute that does not exist."""


@dataclass(frozen=True)
class Kept:
    """A value as it was: the object itself, and a copy of what it held."""

    original: Any
    content: Any
    """A constant, a copy of a tensor, the state of a generator, or the `Kept` members of a container."""
    put_back: Callable[[], object] | None = None
    """Restores the object's content; None if the content cannot have changed."""

    def restore(self) -> Any:
        """The object, with its earlier content."""
        if self.put_back is not None:
            self.put_back()
        return self.original

    def same(self, other: Kept, same_leaf: Callable[[Kept, Kept], bool] | None = None) -> bool:
        """Whether two values were equal. `same_leaf` compares values that are not containers. By default copied values
        are compared exactly, and values that are not copied by identity.
        """
        one, two = self.content, other.content
        if type(self.original) is not type(other.original) or type(one) is not type(two):
            return False
        if isinstance(one, dict):
            return one.keys() == two.keys() and all(one[key].same(two[key], same_leaf) for key in one)
        if isinstance(one, list):
            return len(one) == len(two) and all(a.same(b, same_leaf) for a, b in zip(one, two, strict=True))
        return (same_leaf or _same_leaf)(self, other)


def _same_leaf(one: Kept, other: Kept) -> bool:
    if one.content is UNKNOWN:
        return one.original is other.original
    if isinstance(one.content, Tensor):
        return same_bits(one.content, other.content)
    return bool(one.content == other.content) or (one.content != one.content and other.content != other.content)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type and values; NaN equals NaN. Tensors without data have no values."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    if one.is_meta or torch.equal(one, other):
        return True
    has_nan = one.is_floating_point() or one.is_complex()
    return has_nan and bool(((one == other) | (one.isnan() & other.isnan())).all())


def put(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor this value, and its shape if that has changed."""
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        tensor.data = value.clone()
    elif not same_bits(tensor, value):  # a tensor whose elements share memory cannot be written
        with torch.no_grad():
            tensor.detach().copy_(value)


def keep(value: Any, depth: int = 0, *, arrays: bool = True, fields: bool = True, most: int = MOST_MEMBERS) -> Kept:
    """A copy of a value, for the types that are known. Parameters are left out, as modules keep them.

    With `arrays` false tensors and arrays are left out too, as in a data set, which may be large. With `fields` false
    the attributes of objects are left out. `most`: the largest container that is copied.
    """

    def inner(member: Any) -> Kept:
        return keep(member, depth + 1, arrays=arrays, fields=fields, most=most)

    if isinstance(value, CONSTANTS):
        return Kept(value, value)
    if isinstance(value, Tensor):
        left_out = not arrays or isinstance(value, (nn.Parameter, FakeTensor)) or value.layout is not torch.strided
        if left_out:
            return Kept(value, UNKNOWN)
        copy = value.detach().clone()
        return Kept(value, copy, None if value.is_meta else lambda: put(value, copy))
    if (generator := _keep_generator(value)) is not None:
        return generator
    if depth == MOST_DEPTH or (isinstance(value, list | tuple | dict | set | deque) and len(value) > most):
        return Kept(value, UNKNOWN)
    if isinstance(value, list | tuple | deque):
        members = [inner(member) for member in value]
        return Kept(value, members, lambda: _put_back_members(value, members))
    if isinstance(value, dict):
        entries = {key: inner(entry) for key, entry in value.items()}
        return Kept(value, entries, lambda: _put_back_entries(value, entries))
    if isinstance(value, set):
        elements = frozenset(value)
        return Kept(value, elements, lambda: _refill(value, elements))
    if (
        fields
        and is_users_class(type(value))
        and not isinstance(value, nn.Module | type)
        and hasattr(value, "__dict__")
    ):
        own = {name: inner(entry) for name, entry in vars(value).items()}
        return Kept(value, own, lambda: _put_back_entries(vars(value), own))
    return (_keep_array(value) if arrays else None) or Kept(value, UNKNOWN)


def _put_back_members(target: Any, members: list[Kept]) -> None:
    restored = [member.restore() for member in members]
    if not isinstance(target, tuple):
        target.clear()
        target.extend(restored)


def _put_back_entries(target: dict[Any, Any], entries: Mapping[Any, Kept]) -> None:
    _refill(target, {key: entry.restore() for key, entry in entries.items()})


def _refill(target: Any, content: Any) -> None:
    target.clear()
    target.update(content)


def _keep_generator(value: Any) -> Kept | None:
    """A random generator of the user's own. Its content is its state."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits, place = value.bit_generator, value.bit_generator.state
        return Kept(value, keep(place).content, lambda: setattr(bits, "state", place))
    if isinstance(value, torch.Generator) or (numpy is not None and isinstance(value, numpy.random.RandomState)):
        state = value.get_state()
        return Kept(value, keep(state).content, lambda: value.set_state(state))
    if isinstance(value, random.Random):
        before = value.getstate()
        return Kept(value, before, lambda: value.setstate(before))
    return None


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator of torch, Python or NumPy."""
    return _keep_generator(value) is not None


def _keep_array(value: Any) -> Kept | None:
    """An array of numbers of NumPy."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.kind not in "iufb":
        return None
    copy = value.copy()

    def put_back() -> None:
        if value.flags.writeable:
            value[...] = copy

    return Kept(value, torch.from_numpy(copy), put_back)


# Attributes of objects and classes, and global variables.


@dataclass(frozen=True, eq=False)
class Attribute:
    """An attribute of an object or a class, or a global variable of a file."""

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


@contextmanager
def replaced_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute of an object or a class has another value."""
    own = vars(owner).get(name, ABSENT)
    _put_attribute(owner, name, value)
    try:
        yield
    finally:
        _put_attribute(owner, name, own)


def _put_attribute(owner: Any, name: str, value: Any) -> None:
    """Set or delete an attribute without the object's own __setattr__: nn.Module's would register parameters."""
    if isinstance(owner, type):
        setattr(owner, name, value) if value is not ABSENT else delattr(owner, name)
    elif value is ABSENT:
        del vars(owner)[name]
    else:
        vars(owner)[name] = value


class Attributes:
    """The attributes of some objects, and the variables of some functions, at one moment."""

    def __init__(self, owners: Iterable[Any], functions: Iterable[object] = (), **rules: Any) -> None:
        """`rules`: keyword arguments of `keep`."""
        self._owners, self._rules = list(owners), rules
        self.values = {one: keep(one.value, **rules) for one in self._present()}
        self._functions = FunctionState(functions)

    def _present(self) -> Iterator[Attribute]:
        for owner in self._owners:
            is_code = isinstance(owner, type | ModuleType)
            for name, value in vars(owner).items():
                if _is_state(name, value) if is_code else name not in INTERNAL:
                    yield Attribute(owner, name)

    def changed(self) -> list[Attribute]:
        """The attributes that are new or have changed."""
        present = dict.fromkeys(self._present())
        return [
            one
            for one in dict.fromkeys((*self.values, *present))
            if one not in self.values or one not in present or not self.values[one].same(keep(one.value, **self._rules))
        ]

    def restore(self) -> None:
        """Bring everything back to this moment."""
        self._functions.restore()
        for one in [one for one in self._present() if one not in self.values]:
            _put_attribute(one.owner, one.name, ABSENT)
        for one, kept in self.values.items():
            if kept.restore() is not vars(one.owner).get(one.name, ABSENT):
                _put_attribute(one.owner, one.name, kept.original)


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


class FunctionState:
    """The state of some functions at one moment. A function may close over a number or a list, read a global variable,
    or be an object with attributes.
    """

    def __init__(self, functions: Iterable[object]) -> None:
        self._kept: list[Kept] = []
        self._cells: list[tuple[CellType, Kept]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        for function in functions:
            for _, value in reachable_values(function):
                if isinstance(value, FunctionType):
                    self._keep_variables(value)
                elif not isinstance(value, nn.Module):
                    self._kept.append(keep(value))

    def _keep_variables(self, function: FunctionType) -> None:
        """Keep the numbers that the function may assign, in variables of its enclosing function and in global
        variables.
        """
        if not is_user_code(function.__code__.co_filename):
            return
        for cell in function.__closure__ or ():
            value = _content(cell)
            if isinstance(value, (*CONSTANTS, Tensor)):
                self._cells.append((cell, keep(value)))
        for name in function.__code__.co_names:
            value = function.__globals__.get(name, self)
            if isinstance(value, (*CONSTANTS, Tensor)):
                self._globals.append((function.__globals__, name, value))

    def restore(self) -> None:
        """Bring everything back to this moment."""
        for kept in self._kept:
            kept.restore()
        for cell, kept in self._cells:
            cell.cell_contents = kept.restore()
        for variables, name, value in self._globals:
            variables[name] = value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return cell
