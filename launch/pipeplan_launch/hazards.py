"""What torch.export would trace without a word, and wrongly.

Gradients that the user writes would be lost, and so would hooks on tensors; random numbers of Python and NumPy would be
drawn once, for all minibatches.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pipeplan_launch.opaque import FunctionCall, Structure, record


class Untraceable(Exception):
    """Something in forward() whose effect would not be in the graph."""


@contextmanager
def watched() -> Iterator[None]:
    """Inside, what is traced keeps the user's own gradients; hooks on tensors and others' numbers are `Untraceable`."""
    apply, register = torch.autograd.Function.__dict__["apply"], Tensor.register_hook
    torch.autograd.Function.apply = classmethod(partial(_apply, _unbound(apply)))  # type: ignore[method-assign,assignment]
    Tensor.register_hook = _refuse_hook  # type: ignore[method-assign]
    draws = _Draws()
    hooks = register_module_forward_pre_hook(draws.before), register_module_forward_hook(draws.after)
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = register  # type: ignore[method-assign]


def _unbound(method: Any) -> Callable[..., Any]:
    """The function of a class method, which is given the class first; newer torch has written this one in C."""
    if isinstance(method, classmethod):
        return method.__func__

    def call(owner: type, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, owner)(*args, **kwargs)

    return call


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


class _Draws:
    """Finds the innermost module that draws random numbers which are not torch's."""

    def __init__(self) -> None:
        self._open: list[tuple[nn.Module, Any]] = []

    def before(self, module: nn.Module, given: Any) -> None:
        self._open.append((module, _numbers()))

    def after(self, module: nn.Module, given: Any, value: Any) -> None:
        while self._open:
            opened, before = self._open.pop()
            if opened is module:
                if before != _numbers():
                    self._refuse(module)
                return

    def _refuse(self, module: nn.Module) -> None:
        raise Untraceable(
            f"{type(module).__name__}.forward() draws random numbers of Python or NumPy, which would be drawn once, "
            "while it is traced: draw torch's, or do it in a submodule of its own, which is then one layer"
        )


def _numbers() -> Any:
    """Where the generators of Python and NumPy are."""
    if "numpy" not in sys.modules:
        return random.getstate()
    _, keys, place, *_ = sys.modules["numpy"].random.get_state()
    return random.getstate(), place, keys.tobytes()
