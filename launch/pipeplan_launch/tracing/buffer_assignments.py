"""Buffers that forward() replaces, as in `self.mean = 0.9 * self.mean + ...`.

A stage has one tensor for each buffer, so the new tensor is copied into it at the end of the forward pass. Until then
code that reads the buffer sees the tensor that the model would see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.aliasing import GraphBehaviour, tensors_in
from pipeplan_launch.tracing.regions import attribute_at, operator_name


@contextmanager
def assignments_copied(model: nn.Module) -> Iterator[None]:
    """Context in which the model copies tensors that it assigns to buffers into these.

    Raises `LaunchError` for a tensor of another shape or type.
    """
    module_hooks = nn.modules.module._global_buffer_registration_hooks
    others = dict(module_hooks)
    before: dict[str, Tensor] = {}

    def remember(module: nn.Module, inputs: Any) -> None:
        before.clear()
        # torch.export has such hooks of its own, which copy what the model's root assigns a second time.
        module_hooks.clear()
        before.update({path: value for path, _, _, value in _places(model)})

    def copy_back(module: nn.Module, inputs: Any, output: Any) -> None:
        changed = [place for place in _places(model) if before.get(place[0], place[3]) is not place[3]]
        for path, _, _, new in changed:
            _check_same_kind(path, before[path], new)
        # A buffer may be assigned to another one, which the copies must not change before it is read.
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
    """Copy the state that the graph writes to where the backward pass may keep it. Returns whether anything changed.

    A stage runs the forward pass of the next minibatches, which writes the state, before the backward pass of this one.
    """
    state = {
        storage
        for node in graph_module.graph.find_nodes(op="get_attr")
        for storage in behaviour.storages(node)
        if not isinstance(attribute_at(graph_module, str(node.target)), nn.Parameter)
    }
    written = {
        storage for arguments in behaviour.written.values() for one in arguments for storage in behaviour.storages(one)
    } & state
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
