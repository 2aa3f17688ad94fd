"""Code that torch.export would trace silently and wrongly.

Custom gradients and tensor hooks would be lost. Random numbers of Python and NumPy would be drawn once and used for
all minibatches.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pipeplan_launch.job.kept_values import replaced_attribute
from pipeplan_launch.tracing.opaque_calls import AutogradFunctionCall, ValueStructure, record_call

TENSOR_DATA: Any = Tensor.data
"""Torch's own descriptor of `.data`."""


class Untraceable(Exception):
    """forward() has an effect that would not be in the graph."""


@contextmanager
def hazards_refused() -> Iterator[None]:
    """Context in which tracing keeps the user's own gradients, and raises `Untraceable` for tensor hooks and for random
    numbers of Python or NumPy.
    """
    apply = torch.autograd.Function.__dict__["apply"]
    random_watch = _RandomNumberWatch()
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.autograd.Function, "apply", classmethod(partial(_apply, _unbound(apply)))),
            (Tensor, "register_hook", _refuse_tensor_hook),
            (Tensor, "data", property(_data, _set_data)),
            (torch.autograd, "_engine_run_backward", _refuse_differentiation),
        ):
            stack.enter_context(replaced_attribute(owner, name, value))
        stack.callback(register_module_forward_pre_hook(random_watch.before).remove)
        stack.callback(register_module_forward_hook(random_watch.after).remove)
        yield


def _unbound(method: Any) -> Callable[..., Any]:
    """The function of a class method, with the class as its first parameter. In newer versions of torch `apply` is in
    C.
    """
    if isinstance(method, classmethod):
        return method.__func__

    def call(owner: type, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, owner)(*args, **kwargs)

    return call


def _apply(original: Any, function: type, *args: Any, **kwargs: Any) -> Any:
    """Replaces `function.apply`."""
    if function is torch.utils.checkpoint.CheckpointFunction:
        # Checkpointing only saves memory, and its traced forward would have no gradient.
        run, _, *rest = args
        return run(*rest)
    if function.__module__.startswith(("torch.", "pipeplan_launch.")):
        return original(function, *args, **kwargs)
    arguments, tensors, sizes = ValueStructure.of((args, kwargs))
    if any(callable(leaf) or isinstance(leaf, nn.Module) for leaf in arguments.leaves):
        raise Untraceable(f"the autograd function {function.__name__} takes a function: its tensors cannot be followed")
    call = AutogradFunctionCall(partial(original, function), function, arguments)
    outputs = record_call(call, tensors, sizes)
    assert call.returns is not None
    return call.returns.filled(outputs)


_TORCH = str(Path(torch.__file__).parent)


def _data(tensor: Tensor) -> Tensor:
    """Replaces `tensor.data`, which export would turn into a constant, by a detached view of the same memory."""
    return TENSOR_DATA.__get__(tensor) if _is_called_by_torch() else tensor.detach()


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """Replaces `tensor.data = value`, which would not be in the graph, by a copy of the values into the same memory."""
    if _is_called_by_torch():
        TENSOR_DATA.__set__(tensor, value)
    elif (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        raise Untraceable("forward() gives the .data of a tensor another shape or type: assign a new tensor instead")
    elif value is not tensor:
        tensor.detach().copy_(value.detach())


def _is_called_by_torch() -> bool:
    """Whether the function that reads or sets `.data` is torch's own, such as a function of export."""
    return sys._getframe(2).f_code.co_filename.startswith(_TORCH)


def _refuse_tensor_hook(tensor: Tensor, hook: Any) -> Any:
    raise Untraceable("forward() registers a hook on a tensor, which would not be in the graph")


def _refuse_differentiation(*args: Any, **kwargs: Any) -> Any:
    raise Untraceable(
        "forward() differentiates inside itself, with torch.autograd.grad or backward(): do that in a submodule of its "
        "own, which is then one layer"
    )


class _RandomNumberWatch:
    """Finds the innermost module that draws random numbers from Python's or NumPy's generators."""

    def __init__(self) -> None:
        self._open: list[tuple[nn.Module, Any]] = []

    def before(self, module: nn.Module, inputs: Any) -> None:
        self._open.append((module, _generator_states()))

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        while self._open:
            opened, before = self._open.pop()
            if opened is module:
                if before != _generator_states():
                    self._refuse(module)
                return

    def _refuse(self, module: nn.Module) -> None:
        raise Untraceable(
            f"{type(module).__name__}.forward() draws random numbers of Python or NumPy, which would be drawn once, "
            "while it is traced: draw torch's, or do it in a submodule of its own, which is then one layer"
        )


def _generator_states() -> Any:
    """States of Python's generator, and of NumPy's if it is imported."""
    if "numpy" not in sys.modules:
        return random.getstate()
    _, keys, place, *_ = sys.modules["numpy"].random.get_state()
    return random.getstate(), place, keys.tobytes()
