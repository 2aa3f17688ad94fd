"""Who reads and writes some attributes while a model runs.

A read counts if its value goes anywhere else than into the attribute itself: `self.step += 1` and
`self.log.append(x)` do not read in this sense, `x / self.step` does. Only a read that comes before any write in a
forward pass sees what an earlier pass has left.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pipeplan_launch.tracing.python_state import Attribute

FILLING = frozenset({"append", "appendleft", "add", "extend", "update", "clear", "pop", "popleft", "insert"})
"""Methods of containers that a statement calls to change the container."""


@dataclass
class Accesses:
    """The accesses to one attribute."""

    is_carried: bool = False
    """Whether a forward pass reads a value that it did not write before."""
    is_written: bool = False
    """Whether a write was seen."""
    place: str = ""
    """`file:line: code` of the first write, or else of the first access."""
    around: tuple[nn.Module, ...] | None = None
    """The modules that were running at every access, outermost first; None before the first."""
    _is_earlier: bool = field(default=True, repr=False)
    """Whether the value depends on what it was before this forward pass."""
    _is_updated: bool = field(default=False, repr=False)
    """Whether this forward pass has read the value to compute the next one from it."""

    def begin_pass(self) -> None:
        """Note that a forward pass of the model begins."""
        self._is_earlier, self._is_updated = True, False

    def note_write(self) -> None:
        """Note that the attribute was assigned."""
        self.is_written = True
        self._is_earlier = self._is_earlier and self._is_updated

    def note_read(self, *, only_for_itself: bool) -> None:
        """Note that the attribute was read."""
        self._is_updated = self._is_updated or only_for_itself
        self.is_carried = self.is_carried or (self._is_earlier and not only_for_itself)


@contextmanager
def accesses_noted(model: nn.Module, attributes: Sequence[Attribute]) -> Iterator[dict[Attribute, Accesses]]:
    """Context that notes the accesses to these attributes while the model runs."""
    noted = {attribute: Accesses() for attribute in attributes}
    by_name = {(id(attribute.owner), attribute.name): access for attribute, access in noted.items()}
    running: list[nn.Module] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        running.append(module)
        if module is model:
            for access in noted.values():
                access.begin_pass()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        while running and running.pop() is not module:
            pass

    with ExitStack() as stack:
        for hook in (register_module_forward_pre_hook(enter), register_module_forward_hook(leave)):
            stack.callback(hook.remove)
        for kind in dict.fromkeys(_class_to_watch(attribute.owner) for attribute in attributes):
            stack.enter_context(_watched(kind, by_name, running))
        yield noted


def _class_to_watch(owner: Any) -> type:
    return nn.Module if isinstance(owner, nn.Module) else type(owner)


@contextmanager
def _watched(kind: type, noted: dict[tuple[int, str], Accesses], running: list[nn.Module]) -> Iterator[None]:
    """Context in which accesses to attributes of a class are noted."""
    own = {name: vars(kind)[name] for name in ("__getattribute__", "__setattr__") if name in vars(kind)}
    get: Any = kind.__getattribute__
    put: Any = kind.__setattr__

    def read(instance: Any, name: str) -> Any:
        access = noted.get((id(instance), name))
        if access is not None:
            _note(access, running, sys._getframe(1), name, writes=False)
        return get(instance, name)

    def write(instance: Any, name: str, value: Any) -> None:
        access = noted.get((id(instance), name))
        if access is not None:
            _note(access, running, sys._getframe(1), name, writes=True)
        put(instance, name, value)

    kind.__getattribute__, kind.__setattr__ = read, write  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        for name in ("__getattribute__", "__setattr__"):
            if name in own:
                setattr(kind, name, own[name])
            else:
                delattr(kind, name)


def _note(access: Accesses, running: list[nn.Module], frame: FrameType, name: str, *, writes: bool) -> None:
    file, line = frame.f_code.co_filename, frame.f_lineno
    if not access.place or (writes and not access.is_written):
        access.place = f"{file}:{line}: {linecache.getline(file, line).strip()}"
    within = access.around if access.around is not None else tuple(running)
    access.around = tuple(module for module in within if module in running)
    if writes:
        access.note_write()
    else:
        access.note_read(only_for_itself=_changes_itself_only(frame, name))


def _changes_itself_only(frame: FrameType, name: str) -> bool:
    """Whether the running statement only changes the attribute of that name, from its own value and others."""
    statement = _running_statement(frame)
    if isinstance(statement, ast.AugAssign):
        return _root(statement.target) == name and not _reads(statement.value, name)
    if isinstance(statement, ast.Assign):
        return all(_root(target) == name for target in statement.targets) and _is_plain(statement.value)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if isinstance(call.func, ast.Attribute) and call.func.attr in FILLING:
            return _root(call.func.value) == name and not any(_reads(argument, name) for argument in call.args)
    return False


def _running_statement(frame: FrameType) -> ast.stmt | None:
    """The innermost statement that a frame is in."""
    line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or column is None:
        return None
    around = [
        one
        for one in _statements(frame.f_code.co_filename)
        if (one.lineno, one.col_offset) <= (line, column) < (one.end_lineno or 0, one.end_col_offset or 0)
    ]
    return max(around, key=lambda one: (one.lineno, one.col_offset), default=None)


@cache
def _statements(file: str) -> list[ast.stmt]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def _root(target: ast.expr) -> str:
    """The attribute that an expression is, or takes a member of: `n` for `self.n` and `self.n["a"][0]`."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target.attr if isinstance(target, ast.Attribute) else ""


def _reads(expression: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(expression))


def _is_plain(expression: ast.expr) -> bool:
    """Whether an expression only computes: it calls nothing that could use a value for something else."""
    return not any(isinstance(node, ast.Call | ast.NamedExpr | ast.Lambda) for node in ast.walk(expression))
