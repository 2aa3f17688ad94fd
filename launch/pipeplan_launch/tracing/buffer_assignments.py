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
from pipeplan_launch.tracing.regions import REGIONS, operator_name


@contextmanager
def assignments_copied(model: nn.Module) -> Iterator[set[str]]:
    """Context in which the model copies tensors that it assigns to buffers into these. Yields the buffers' names.

    Raises `LaunchError` for a tensor of another shape or type.
    """
    assigned: set[str] = set()
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
            assigned.add(path)

    hooks = model.register_forward_pre_hook(remember), model.register_forward_hook(copy_back)
    try:
        yield assigned
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
        change = f"from {type(old).__name__} to {type(new).__name__}"
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


def protect_saved_values(graph_module: fx.GraphModule, assigned: set[str]) -> None:
    """Let the graph read copies of the buffers that it overwrites at its end.

    The backward pass may need their first values, as it may after an assignment in the model.
    """
    for node in graph_module.graph.find_nodes(op="get_attr"):
        readers = [user for user in node.users if not _overwrites(user, node) and operator_name(user) not in REGIONS]
        if node.target not in assigned or not readers:
            continue
        with graph_module.graph.inserting_before(readers[0]):
            clone = graph_module.graph.call_function(_CLONE, (node,))
        clone.meta = {**readers[0].meta, "val": node.meta.get("val")}
        for reader in readers:
            reader.replace_input_with(node, clone)
    graph_module.recompile()


_CLONE = torch.ops.aten.clone.default


def _overwrites(user: fx.Node, buffer: fx.Node) -> bool:
    return operator_name(user) == "copy_" and user.args[0] is buffer
