"""Running a model unchanged to observe what some of its modules return."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeplan_launch.opaque import Structure
from pipeplan_launch.outputs import CONSTANTS, register
from pipeplan_launch.returns import Calls, Refused, Seen, returns_of
from pipeplan_launch.whole import forwards

KNOWN = (type(None), *CONSTANTS, slice, type(...), torch.layout, torch.memory_format, enum.Enum)
"""Types that an argument of an opaque module may have besides tensors."""


def learn(model: nn.Module, paths: Sequence[str], run: Callable[[int], Any], minibatches: Sequence[int]) -> Calls:
    """Observe what the modules return while `run(n)` runs the model on n samples. Raises `Refused` for a module that
    cannot be opaque.
    """
    seen: dict[str, list[list[Seen]]] = {path: [] for path in paths}
    with unchanged(model):
        for minibatch in minibatches:
            for path in paths:
                seen[path].append([])
            recorders = {path: _recorder(path, model.get_submodule(path), minibatch, seen[path][-1]) for path in paths}
            with forwards(model, recorders):
                run(minibatch)
    returns = {}
    for path, runs in seen.items():
        if len({len(calls) for calls in runs}) != 1:
            raise Refused(path, "is called more or less often with another minibatch")
        if not runs[0]:
            raise Refused(path, "is used in another way than by calling it")
        returns[path] = tuple(returns_of(path, calls) for calls in zip(*runs, strict=True))
    return returns


def _recorder(path: str, module: nn.Module, minibatch: int, calls: list[Seen]) -> Callable[..., Any]:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments, tensors, _ = Structure.of((args, kwargs))
        unknown = next((leaf for leaf in arguments.leaves if not isinstance(leaf, KNOWN)), None)
        if unknown is not None:
            raise Refused(path, f"is given an object of class {type(unknown).__name__}, which may hold tensors")
        shapes, before = tuple(tuple(tensor.shape) for tensor in tensors), [tensor._version for tensor in tensors]
        value = original(*args, **kwargs)
        register(value)
        structure, returned, _ = Structure.of(value)
        # Records no tensors, which would keep the activations of the whole run alive.
        outputs = [(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in returned]
        written = tuple(index for index, tensor in enumerate(tensors) if tensor._version != before[index])
        calls.append(Seen(minibatch, shapes, written, structure, tuple(outputs)))
        return value

    return forward


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context after which buffers and plain attributes of the model are as before."""
    plain = {module: {k: v for k, v in vars(module).items() if _is_plain(v)} for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for module in plain:
            vars(module).update(plain[module])
            module._buffers.update(buffers[module])


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | None)
