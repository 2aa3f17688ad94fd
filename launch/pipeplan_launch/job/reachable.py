"""The values that a user's function can reach: enclosed variables, attributes of its object, and globals.

A loss or a metric that is a plain function may read modules, tensors and counters in any of these places.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from pipeplan_launch.job.user_code import is_user_code, is_users_class

MOST_MEMBERS = 1000
"""Largest number of members of a list or dictionary that are visited. For a larger one only its length counts."""
MOST_VALUES = 20_000
"""Largest number of values that are visited."""
_DEEPEST = 12
INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def reachable_values(function: object) -> Iterator[tuple[str, Any]]:
    """(path in the user's terms, value) of everything that a function can reach, itself included, each value once.

    It visits functions and classes of the user, and modules of torch, but nothing else in libraries.
    """
    seen: set[int] = set()
    waiting: deque[tuple[str, Any, int]] = deque([("", function, 0)])
    for _ in range(MOST_VALUES):
        if not waiting:
            return
        path, value, depth = waiting.popleft()
        if isinstance(value, nn.Module | Tensor | list | dict | set | deque | FunctionType):
            if id(value) in seen:
                continue
            seen.add(id(value))
        yield path, value
        if depth < _DEEPEST:
            waiting.extend((_joined(path, name), member, depth + 1) for name, member in _members(value))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of everything that a value refers to. A name is empty if the user's code has none."""
    if isinstance(value, functools.partial):
        yield "", value.func
        yield from ((str(number), argument) for number, argument in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, FunctionType):
        yield from _members_of_function(value)
    elif isinstance(value, nn.Module):
        yield from value.named_children()
        yield from value.named_buffers(recurse=False)
        yield from ((name, one) for name, one in vars(value).items() if name not in INTERNAL)
        yield from _methods_of(value)
    elif isinstance(value, Mapping) and len(value) <= MOST_MEMBERS:
        yield from ((str(key), member) for key, member in list(value.items()))
    elif isinstance(value, list | tuple | set | deque) and len(value) <= MOST_MEMBERS:
        yield from ((str(number), member) for number, member in enumerate(list(value)))
    elif isinstance(value, SimpleNamespace) or (_is_of_user(value) and hasattr(value, "__dict__")):
        yield from list(vars(value).items())
        yield from _methods_of(value)


def _methods_of(value: object) -> Iterator[tuple[str, Any]]:
    """The functions of an object's class, if the user defined the class."""
    if _is_of_user(value):
        for kind in type(value).__mro__:
            yield from (("", one) for one in vars(kind).values() if isinstance(one, FunctionType))


def _is_of_user(value: object) -> bool:
    """Whether a value is an object of a class that the user defined."""
    return not isinstance(value, type | ModuleType | Tensor) and is_users_class(type(value))


def _members_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    if not is_user_code(function.__code__.co_filename):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the name has no value yet
            continue
    yield from ((str(number), value) for number, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that a function, and functions inside it, look up outside of their own variables."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
