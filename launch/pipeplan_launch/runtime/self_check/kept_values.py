"""Copies of the values that user code may keep between two calls: numbers, tensors, containers, random generators."""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan_launch.job.pass_conditions import mix_seed, seed_everything
from pipeplan_launch.job.reachable import reachable_values
from pipeplan_launch.job.user_code import is_user_code

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
MOST_MEMBERS = 10_000
"""Largest container that is copied: larger ones hold data, and copying them would take long."""
MOST_DEPTH = 8


class Unknown:
    """Placeholder for a value that is not copied. All placeholders count as equal."""


UNKNOWN = Unknown()


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


def keep(value: Any, depth: int = 0, *, arrays: bool = True) -> Kept:
    """A copy of a value, for the types that are known. Parameters are left out, as modules keep them.

    With `arrays` false tensors and arrays are left out too, as in a data set, which may be large.
    """
    if isinstance(value, CONSTANTS):
        return Kept(value, value)
    if isinstance(value, Tensor):
        return _keep_tensor(value) if arrays else Kept(value, UNKNOWN)
    if depth < MOST_DEPTH:
        kept = (
            _keep_generator(value)
            or (_keep_array(value) if arrays else None)
            or _keep_container(value, depth, arrays)
            or _keep_fields(value, depth, arrays)
        )
        if kept is not None:
            return kept
    return Kept(value, UNKNOWN)


def _keep_tensor(tensor: Tensor) -> Kept:
    if isinstance(tensor, (nn.Parameter, FakeTensor)) or tensor.is_meta or tensor.layout is not torch.strided:
        return Kept(tensor, UNKNOWN)
    copy = tensor.detach().clone()

    def put_back() -> None:
        if not torch.equal(tensor, copy):  # a tensor whose elements share memory cannot be written
            with torch.no_grad():
                tensor.detach().copy_(copy)

    return Kept(tensor, copy, put_back)


def _keep_container(value: Any, depth: int, arrays: bool) -> Kept | None:
    if isinstance(value, (list, deque)) and len(value) <= MOST_MEMBERS:
        members = [keep(member, depth + 1, arrays=arrays) for member in value]

        def put_back_members() -> None:
            restored = [member.restore() for member in members]
            value.clear()
            value.extend(restored)

        return Kept(value, members, put_back_members)
    if isinstance(value, tuple) and len(value) <= MOST_MEMBERS:
        fixed = [keep(member, depth + 1, arrays=arrays) for member in value]
        return Kept(value, fixed, lambda: [member.restore() for member in fixed])
    if isinstance(value, dict) and len(value) <= MOST_MEMBERS:
        entries = {key: keep(entry, depth + 1, arrays=arrays) for key, entry in value.items()}
        return Kept(value, entries, lambda: _put_back_entries(value, entries))
    if isinstance(value, set) and len(value) <= MOST_MEMBERS:
        elements = frozenset(value)

        def put_back_elements() -> None:
            value.clear()
            value.update(elements)

        return Kept(value, elements, put_back_elements)
    return None


def _put_back_entries(target: dict[Any, Any], entries: Mapping[Any, Kept]) -> None:
    restored = {key: entry.restore() for key, entry in entries.items()}
    target.clear()
    target.update(restored)


def _keep_generator(value: Any) -> Kept | None:
    """A random generator of the user's own. Its content is its state."""
    if isinstance(value, torch.Generator):
        position = value.get_state()
        return Kept(value, position, lambda: value.set_state(position))
    if isinstance(value, random.Random):
        state = value.getstate()
        return Kept(value, UNKNOWN, lambda: value.setstate(state))
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        bits, place = value.bit_generator, value.bit_generator.state
        return Kept(value, UNKNOWN, lambda: setattr(bits, "state", place))
    if isinstance(value, numpy.random.RandomState):
        before = value.get_state()
        return Kept(value, UNKNOWN, lambda: value.set_state(before))
    return None


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


def _keep_fields(value: Any, depth: int, arrays: bool) -> Kept | None:
    """The fields of an object of one of the user's own classes, such as a meter or a schedule."""
    if isinstance(value, (nn.Module, type)) or not hasattr(value, "__dict__") or not is_users_class(type(value)):
        return None
    fields = {name: keep(entry, depth + 1, arrays=arrays) for name, entry in vars(value).items()}
    return Kept(value, fields, lambda: _put_back_entries(vars(value), fields))


def is_users_class(kind: type) -> bool:
    """Whether a class is defined in a file of the user's."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return file is not None and is_user_code(file)


# The state that the user's functions keep between two calls: the job's loss, and the hooks of parameters.
#
# A function may close over a number or a list, read a global variable, or be an object with attributes.


def hooks_of(parameters: Mapping[str, Tensor]) -> list[Any]:
    """The hooks that `register_hook` has put on these parameters."""
    return [hook for one in parameters.values() for hook in (getattr(one, "_backward_hooks", None) or {}).values()]


class FunctionState:
    """The state of some functions at one moment."""

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


# The same random numbers for the whole model and for its stages, in whatever order their operators run.

CALLS_ALIKE = 1000
"""Calls of one operator with one shape that draw the same numbers. Later calls draw other numbers, so that code that
draws until a number is accepted comes to an end."""


class SameRandomNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds torch's generator before every operator that draws from it, by the operator and the shape of its operands.

    Stages may run operators in another order than the model. Their dropout would then differ, although both are
    correct.
    """

    def __init__(self, seed: int, minibatch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._minibatch = seed, minibatch
        self._calls: Counter[str] = Counter()

    def __enter__(self) -> SameRandomNumbers:
        seed_everything(mix_seed("self-check", self._seed, self._minibatch))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            key = f"{func} {[tuple(one.shape) if isinstance(one, Tensor) else one for one in args]}"
            seed = mix_seed(self._seed, self._minibatch, self._calls[key] // CALLS_ALIKE, str(func))
            self._calls[key] += 1
            torch.default_generator.manual_seed(seed)
        return func(*args, **kwargs)
