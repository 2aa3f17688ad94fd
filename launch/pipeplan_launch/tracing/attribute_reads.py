"""Reads and writes of attributes while a model runs.

A read counts unless its value goes only into the attribute itself: `x / self.step` counts, `self.step += 1` and
`self.log.append(x)` do not. Only a read before the first write of a forward pass sees the value of an earlier pass.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.kept_values import Attribute, replaced_attribute
from pipeplan_launch.job.nested_tensors import tensors_in
from pipeplan_launch.tracing.aliasing import GraphBehaviour
from pipeplan_launch.tracing.regions import attribute_at, operator_name

FILLING = frozenset({"append", "appendleft", "add", "extend", "update", "clear", "pop", "popleft", "insert"})
"""Methods of containers that a statement calls to change the container."""


@dataclass
class Accesses:
    """The accesses to one attribute."""

    is_carried: bool = False
    """Whether a forward pass reads a value from before the pass."""
    is_written: bool = False
    """Whether a write was seen."""
    place: str = ""
    """`file:line: code` of the first write, or else of the first access."""
    around: tuple[nn.Module, ...] | None = None
    """The modules that were running at every access, outermost first; None before the first."""
    _is_earlier: bool = field(default=True, repr=False)
    """Whether the value depends on the value before this forward pass."""
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
        owners = [attribute.owner for attribute in attributes]
        for kind in dict.fromkeys(nn.Module if isinstance(owner, nn.Module) else type(owner) for owner in owners):
            get, put = _watched(kind, by_name, running)
            stack.enter_context(replaced_attribute(kind, "__getattribute__", get))
            stack.enter_context(replaced_attribute(kind, "__setattr__", put))
        yield noted


def _watched(
    kind: type, noted: dict[tuple[int, str], Accesses], running: list[nn.Module]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The methods of a class that read and set attributes, which also note the accesses."""
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

    return read, write


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
    """Whether the running statement only changes the attribute of that name."""
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
    """The attribute in an expression: `n` for `self.n` and for its members, such as `self.n["a"][0]`."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target.attr if isinstance(target, ast.Attribute) else ""


def _reads(expression: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(expression))


def _is_plain(expression: ast.expr) -> bool:
    """Whether an expression only computes: it has no call that could use a value for something else."""
    return not any(isinstance(node, ast.Call | ast.NamedExpr | ast.Lambda) for node in ast.walk(expression))


# Buffers that forward() replaces, as in `self.mean = 0.9 * self.mean + ...`.
#
# A stage has one tensor for each buffer, so the new tensor is copied into it at the end of the forward pass. Until
# then code that reads the buffer sees the tensor that the model would see.


@contextmanager
def assignments_copied(model: nn.Module) -> Iterator[None]:
    """Context in which a tensor that the model assigns to a buffer is copied into the buffer.

    Raises `LaunchError` for a tensor of another shape or type.
    """
    module_hooks = nn.modules.module._global_buffer_registration_hooks
    others = dict(module_hooks)
    before: dict[str, Tensor] = {}

    def remember(module: nn.Module, inputs: Any) -> None:
        before.clear()
        # torch.export has such hooks too, which would copy the assignments of the model's root a second time.
        module_hooks.clear()
        before.update({path: value for path, _, _, value in _places(model)})

    def copy_back(module: nn.Module, inputs: Any, output: Any) -> None:
        changed = [place for place in _places(model) if before.get(place[0], place[3]) is not place[3]]
        for path, _, _, new in changed:
            _check_same_kind(path, before[path], new)
        # One buffer may be assigned to another: all new values are read before any copy changes a buffer.
        values = [new.detach().clone() if len(changed) > 1 else new.detach() for _, _, _, new in changed]
        for (path, buffers, name, _), value in zip(changed, values, strict=True):
            before[path].copy_(value)
            buffers[name] = before[path]

    hooks = model.register_forward_pre_hook(remember), model.register_forward_hook(copy_back)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        module_hooks.update(others)


def _places(model: nn.Module) -> list[tuple[str, dict[str, Tensor | None], str, Any]]:
    """(path, the dictionary that holds it, its name there, the tensor or None) for every buffer of the model."""
    return [
        (f"{path}.{name}" if path else name, module._buffers, name, value)
        for path, module in model.named_modules()
        for name, value in module._buffers.items()
    ]


def _check_same_kind(path: str, old: Tensor | None, new: Any) -> None:
    """Raises `LaunchError` unless the new value of a buffer fits into the memory of the old one."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        change = " to ".join("a tensor" if isinstance(one, Tensor) else str(one) for one in (old, new))
        change = f"from {change}"
    elif old.shape != new.shape:
        change = f"from shape {tuple(old.shape)} to {tuple(new.shape)}"
    elif old.dtype != new.dtype:
        change = f"from {old.dtype} to {new.dtype}"
    else:
        return
    raise LaunchError(
        f"forward() replaces the buffer {path!r} and changes it {change}: register it with the shape and type that it "
        "has after the first minibatch"
    )


def protect_saved_values(graph_module: fx.GraphModule, behaviour: GraphBehaviour) -> bool:
    """Insert copies of state that the graph writes, if the backward pass may need the earlier values. Returns whether
    anything changed.

    The forward passes of the next minibatches write the state before the backward pass of this minibatch.
    """
    state = {
        storage
        for node in graph_module.graph.find_nodes(op="get_attr")
        for storage in behaviour.storages(node)
        if not isinstance(attribute_at(graph_module, str(node.target)), nn.Parameter)
    }
    written = behaviour.written_storages() & state
    found = False
    for node in list(graph_module.graph.nodes) if written else ():
        if node in behaviour.written or not _may_save(node, behaviour):
            continue
        for argument in node.all_input_nodes:
            if behaviour.storages(argument) & written and not behaviour.storages(node) & written:
                with graph_module.graph.inserting_before(node):
                    copied = graph_module.graph.call_function(torch.ops.aten.clone.default, (argument,))
                copied.meta = {**node.meta, "val": argument.meta["val"]}
                node.replace_input_with(argument, copied)
                found = True
    graph_module.recompile()
    return found


UNSAVED = frozenset({"add", "sub", "rsub", "cat", "stack", "clone", "_to_copy"})
"""Operators whose backward pass needs none of their arguments."""


def _may_save(node: fx.Node, behaviour: GraphBehaviour) -> bool:
    """Whether autograd may keep arguments of a node for the backward pass."""
    if not isinstance(node.target, torch._ops.OpOverload) or operator_name(node) in UNSAVED:
        return False
    return any(tensor.requires_grad for tensor in tensors_in(behaviour.values.get(node)))
