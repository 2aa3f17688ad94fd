"""Runs an unchanged model, and observes what some of its modules return."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipeplan_launch.tracing.model_outputs import CONSTANT_TYPES, register_dataclasses
from pipeplan_launch.tracing.opaque_calls import ValueStructure
from pipeplan_launch.tracing.opaque_interface import CannotBeOpaque, ObservedCall, OutputsByModule, infer_call_output
from pipeplan_launch.tracing.opaque_modules import buffer_places, own_call, replaced_forwards
from pipeplan_launch.tracing.python_state import restored_state

ARGUMENT_TYPES = (type(None), *CONSTANT_TYPES, slice, type(...), torch.layout, torch.memory_format, enum.Enum)
"""Types that an argument of an opaque module may have besides tensors."""


def observe_calls(
    model: nn.Module, paths: Sequence[str], run: Callable[[int], Any], minibatches: Sequence[int]
) -> OutputsByModule:
    """Observe what the modules return while `run(n)` runs the model on n samples. Raises `CannotBeOpaque` for a
    module that cannot be opaque.
    """
    seen: dict[str, list[list[ObservedCall]]] = {path: [] for path in paths}
    with restored_state(model):
        for minibatch in minibatches:
            for path in paths:
                seen[path].append([])
            recorders = {path: _recorder(path, model.get_submodule(path), minibatch, seen[path][-1]) for path in paths}
            with replaced_forwards(model, recorders):
                run(minibatch)
    returns = {}
    for path, runs in seen.items():
        if len({len(calls) for calls in runs}) != 1:
            raise CannotBeOpaque(path, "is called more or less often with another minibatch")
        if not runs[0]:
            raise CannotBeOpaque(path, "is used in another way than by calling it")
        returns[path] = tuple(infer_call_output(path, calls) for calls in zip(*runs, strict=True))
    return returns


def _recorder(path: str, module: nn.Module, minibatch: int, calls: list[ObservedCall]) -> Callable[..., Any]:
    original = own_call(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments, tensors, _ = ValueStructure.of((args, kwargs))
        unknown = next((leaf for leaf in arguments.leaves if not isinstance(leaf, ARGUMENT_TYPES)), None)
        if unknown is not None:
            raise CannotBeOpaque(path, f"is given an object of class {type(unknown).__name__}, which may hold tensors")
        shapes, before = tuple(tuple(tensor.shape) for tensor in tensors), [tensor._version for tensor in tensors]
        buffers = buffer_places(module)
        value = original(*args, **kwargs)
        register_dataclasses(value)
        structure, returned, _ = ValueStructure.of(value)
        # No tensors are recorded, because they would keep the activations of the whole run alive.
        outputs = [(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in returned]
        written = tuple(index for index, tensor in enumerate(tensors) if tensor._version != before[index])
        replaced = tuple(
            index
            for index, (own, name, tensor) in enumerate(buffers)
            if own.get(name) is not tensor and tensor is not None
        )
        calls.append(ObservedCall(minibatch, shapes, written, structure, tuple(outputs), replaced))
        return value

    return forward
