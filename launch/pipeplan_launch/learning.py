"""Running a model as it is, to see what some of its modules return."""

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
"""What an argument may be besides a tensor."""


def learn(model: nn.Module, paths: Sequence[str], run: Callable[[int], Any], minibatches: Sequence[int]) -> Calls:
    """See what the modules return while `run(n)` runs the model on n samples. Raises `Refused` for one that cannot."""
    seen: dict[str, list[list[Seen]]] = {path: [] for path in paths}
    with unchanged(model):
        for minibatch in minibatches:
            for path in paths:
                seen[path].append([])
            recorders = {path: _recorder(path, model.get_submodule(path), minibatch, seen[path][-1]) for path in paths}
            with forwards(model, recorders):
                run(minibatch)
    found = {}
    for path, runs in seen.items():
        if len({len(one) for one in runs}) != 1:
            raise Refused(path, "is called more or less often with another minibatch")
        if not runs[0]:
            raise Refused(path, "is used otherwise than by calling it")
        found[path] = tuple(returns_of(path, calls) for calls in zip(*runs, strict=True))
    return found


def _recorder(path: str, module: nn.Module, minibatch: int, calls: list[Seen]) -> Callable[..., Any]:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments, tensors, _ = Structure.of((args, kwargs))
        strange = next((one for one in arguments.leaves if not isinstance(one, KNOWN)), None)
        if strange is not None:
            raise Refused(path, f"is given an object of class {type(strange).__name__}, which may hold tensors")
        given, before = tuple(tuple(one.shape) for one in tensors), [one._version for one in tensors]
        value = original(*args, **kwargs)
        register(value)
        structure, returned, _ = Structure.of(value)
        # Not the tensors themselves: each would keep the activations of the whole run.
        made = [(tuple(one.shape), one.dtype, one.requires_grad) for one in returned]
        written = tuple(index for index, one in enumerate(tensors) if one._version != before[index])
        calls.append(Seen(minibatch, given, written, structure, tuple(made)))
        return value

    return forward


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Buffers and plain attributes are afterwards what they were."""
    plain = {module: {k: v for k, v in vars(module).items() if _is_plain(v)} for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    values = [(one, one.detach().clone()) for one in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, value in values:
                one.copy_(value)
        for module in plain:
            vars(module).update(plain[module])
            module._buffers.update(buffers[module])


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | None)
