"""What torch.export would trace without a word, and wrongly: gradients that the user computes, hooks on tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch.opaque import FunctionCall, Structure, record


class Untraceable(Exception):
    """Something in forward() whose effect would not be in the graph."""


@contextmanager
def watched() -> Iterator[None]:
    """Inside, what is traced keeps the user's own gradients, and a hook on a tensor is `Untraceable`."""
    apply, register = torch.autograd.Function.__dict__["apply"], Tensor.register_hook
    torch.autograd.Function.apply = classmethod(partial(_apply, apply.__func__))  # type: ignore[method-assign,assignment]
    Tensor.register_hook = _refuse_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = register  # type: ignore[method-assign]


def _apply(original: Any, function: type, *args: Any, **kwargs: Any) -> Any:
    """In place of `function.apply`."""
    if function is torch.utils.checkpoint.CheckpointFunction:
        # Only memory is at stake; traced as it is written, it has no gradient.
        run, _, *rest = args
        return run(*rest)
    if function.__module__.startswith(("torch.", "pipeplan_launch.")):
        return original(function, *args, **kwargs)
    arguments, tensors, sizes = Structure.of((args, kwargs))
    if any(callable(one) or isinstance(one, nn.Module) for one in arguments.leaves):
        raise Untraceable(f"the autograd function {function.__name__} takes a function: its tensors cannot be followed")
    call = FunctionCall(partial(original, function), function, arguments)
    made = record(call, tensors, sizes)
    assert call.returns is not None
    return call.returns.filled(made)


def _refuse_hook(tensor: Tensor, hook: Any) -> Any:
    raise Untraceable("forward() registers a hook on a tensor, which would not be in the graph")
