"""Submodules that torch.export cannot look into, taken whole: each is one layer, run as the Python that it is.

What such a module makes cannot be traced, and so it is seen: the model runs twice as it is, on minibatches of two
sizes, and every size that the module returns must be the same or grow with the minibatch. The stages count on that; a
module that returns anything else later ends the run with a line that says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.opaque import Opaque, Structure, record
from pipeplan_launch.returns import Calls, Returns


class ModuleCall(Opaque):
    """The call of a module that is taken whole: its parameters, its buffers, and then what it is called with."""

    def __init__(self, path: str, module: nn.Module, arguments: Structure, returns: Returns) -> None:
        super().__init__("whole", type(module).__name__)
        self.path, self.returns, self._module, self._arguments = path, returns, module, arguments
        self._modes = [(one, one.training) for one in module.modules()]
        self._slots, self._parameters, self._state = _slots(module)

    def evaluated(self) -> ModuleCall:
        """The same call in evaluation mode."""
        changed = copy.copy(self)
        changed._modes = [(one, False) for one, _ in self._modes]
        return changed

    def __call__(self, *given: Any) -> list[Tensor]:
        state, rest = given[: self._state], given[self._state :]
        if any(isinstance(one, FakeTensor) or one.is_meta for one in given if isinstance(one, Tensor)):
            return self._shapes_only(given, rest)
        args, kwargs = self._arguments.filled(rest)
        for module, training in self._modes:
            module.training = training
        with self._holding(state):
            # Not the module itself: its hooks are in the graph, around this call.
            return self._checked(self._module.forward(*args, **kwargs), given, rest)

    @contextmanager
    def _holding(self, state: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the module has these tensors for its own. What it assigns to its buffers goes into theirs."""
        own = [held[name] for held, name, _ in self._slots]
        for held, name, index in self._slots:
            held[name] = state[index]
        try:
            yield
        finally:
            after = [held[name] for held, name, _ in self._slots]
            for (held, name, _), tensor in zip(self._slots, own, strict=True):
                held[name] = tensor
        with torch.no_grad():
            for (_, _, index), tensor in zip(self._slots, after, strict=True):
                if tensor is not state[index] and index >= self._parameters:
                    state[index].copy_(tensor)

    def _checked(self, value: Any, given: Sequence[Any], rest: Sequence[Any]) -> list[Tensor]:
        _, made, _ = Structure.of(value)
        samples = self.returns.minibatch(rest)
        shapes = [tuple(size.at(samples) for size in result.shape) for result in self.returns.results]
        if [tuple(one.shape) for one in made] != shapes:
            raise LaunchError(
                f"the module {self.path!r}, which is taken whole, returned {_written(made)} where it returned "
                f"{_written(shapes)} when the model was traced: sizes may follow from the number of samples only"
            )
        theirs = {one.untyped_storage()._cdata for one in given if isinstance(one, Tensor)}
        # What is traced around the call was shown fresh tensors, one after the other in memory.
        return [one.clone() if one.untyped_storage()._cdata in theirs else one.contiguous() for one in made]

    def _shapes_only(self, given: Sequence[Any], rest: Sequence[Any]) -> list[Tensor]:
        tensors = [one for one in given if isinstance(one, Tensor)]
        for index, one in enumerate(tensors):
            if self._parameters <= index < self._state or index - self._state in self.returns.written:
                torch.autograd.graph.increment_version(one)
        return list(_Shapes.apply(self.returns, self.returns.minibatch(rest), *tensors))  # type: ignore[no-untyped-call]


def state_of(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(parameters, buffers) of a module, each once, in the order in which a call of it takes them."""
    return list(module.parameters()), list(module.buffers())


Slot = tuple[dict[str, Any], str, int]
"""Where a module holds a tensor, under what name, and which of its state that is."""


def _slots(module: nn.Module) -> tuple[list[Slot], int, int]:
    """(all places where the module's state is held, the number of parameters, that of parameters and buffers)."""
    parameters, buffers = state_of(module)
    number = {id(one): index for index, one in enumerate((*parameters, *buffers))}
    slots: list[Slot] = []
    for one in module.modules():
        for held in (one._parameters, one._buffers):
            slots += [(held, name, number[id(tensor)]) for name, tensor in held.items() if tensor is not None]
    return slots, len(parameters), len(parameters) + len(buffers)


class _Shapes(torch.autograd.Function):
    """Tensors without data that follow from others as those of a call do."""

    @staticmethod
    def forward(ctx: Any, returns: Returns, samples: Any, *given: Tensor) -> tuple[Tensor, ...]:
        device = given[-1].device if given else torch.device("cpu")
        made = tuple(
            torch.empty([size.at(samples) for size in one.shape], dtype=one.dtype, device=device)
            for one in returns.results
        )
        ctx.mark_non_differentiable(
            *(tensor for tensor, one in zip(made, returns.results, strict=True) if not one.requires_grad)
        )
        ctx.given = [(one.shape, one.dtype, one.device) for one in given]
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.given]
        return (None, None, *(one if one.is_floating_point() else None for one in made))


def _written(shapes: Sequence[Any]) -> str:
    texts = ["×".join(map(str, getattr(one, "shape", one))) or "a single number" for one in shapes]
    return ", ".join(texts) or "no tensor"


def recorders(model: nn.Module, calls: Calls) -> dict[str, Callable[..., Any]]:
    """For every module a forward() that puts its call into the graph that is being exported."""
    return {path: _as_one_call(path, model.get_submodule(path), returns) for path, returns in calls.items()}


def _as_one_call(path: str, module: nn.Module, returns: tuple[Returns, ...]) -> Callable[..., Any]:
    count = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        # Export may run the model more than once: each run makes the same calls.
        expected = returns[count % len(returns)]
        count += 1
        arguments, tensors, sizes = Structure.of((args, kwargs))
        parameters, buffers = state_of(module)
        made = record(ModuleCall(path, module, arguments, expected), [*parameters, *buffers, *tensors], sizes)
        return expected.structure.filled(made)

    return forward


@contextmanager
def forwards(model: nn.Module, replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Other forwards for some submodules, for a while."""
    own = {}
    for path, forward in replacements.items():
        module = model.get_submodule(path)
        own[path] = module.__dict__.get("forward")
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for path, before in own.items():
            if before is None:
                del model.get_submodule(path).__dict__["forward"]
            else:
                model.get_submodule(path).__dict__["forward"] = before
