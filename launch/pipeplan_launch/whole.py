"""Submodules that torch.export cannot look into, taken whole: each is one layer, run as the Python that it is.

What such a module makes cannot be traced, and so it is seen: the model runs twice as it is, on minibatches of two
sizes, and every size that the module returns must be the same or grow with the minibatch. The stages count on that; a
module that returns anything else later ends the run with a line that says so.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.opaque import Opaque, Structure, record
from pipeplan_launch.outputs import CONSTANTS, register

KNOWN = (type(None), *CONSTANTS, slice, type(...), torch.layout, torch.memory_format, enum.Enum)
"""What an argument may be besides a tensor."""


class Refused(Exception):
    """A module that cannot be taken whole, and why."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


@dataclass(frozen=True)
class Seen:
    """One call of a module, as it was seen with one minibatch size."""

    minibatch: int
    given: tuple[tuple[int, ...], ...]
    """The shapes of the tensors that it was given."""
    written: tuple[int, ...]
    """Which of these it wrote to."""
    structure: Structure
    made: tuple[Tensor, ...]


@dataclass(frozen=True)
class Size:
    """A size that is `fixed` plus `each` for every sample."""

    fixed: int
    each: int

    def at(self, samples: Any) -> Any:
        """The size, for a number of samples that may be symbolic."""
        return self.fixed + self.each * samples if self.each else self.fixed


@dataclass(frozen=True)
class Result:
    """A tensor that a module makes."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Returns:
    """What one call of a module returns."""

    structure: Structure
    results: tuple[Result, ...]
    written: tuple[int, ...]
    """Which of the tensors that it is given it writes to."""
    samples: tuple[int, int, Size] | None = field(default=None)
    """(tensor, dimension, size there): where the number of samples is to be read."""

    def minibatch(self, tensors: Sequence[Tensor]) -> Any:
        """The number of samples, from what the call was given."""
        if self.samples is None:
            return 0
        tensor, dimension, size = self.samples
        found = tensors[tensor].shape[dimension]
        return found if size == Size(0, 1) else (found - size.fixed) // size.each


class ModuleCall(Opaque):
    """The call of a module that is taken whole: its parameters, its buffers, and then what it is called with."""

    def __init__(self, path: str, module: nn.Module, arguments: Structure, returns: Returns) -> None:
        super().__init__("whole", type(module).__name__)
        self.path, self.returns, self.training = path, returns, True
        self._runner, self._arguments = _Forward(module), arguments
        self.parameters = tuple(f"module.{name}" for name, _ in module.named_parameters())
        self.buffers = tuple(f"module.{name}" for name, _ in module.named_buffers())

    def evaluated(self) -> ModuleCall:
        """The same call in evaluation mode."""
        changed = copy.copy(self)
        changed.training = False
        return changed

    def __call__(self, *given: Any) -> list[Tensor]:
        count = len(self.parameters) + len(self.buffers)
        rest = given[count:]
        if any(isinstance(one, FakeTensor) or one.is_meta for one in given if isinstance(one, Tensor)):
            return self._shapes_only(given, rest)
        state = dict(zip((*self.parameters, *self.buffers), given, strict=False))
        before = dict(state)
        args, kwargs = self._arguments.filled(rest)
        self._runner.module.train(self.training)
        made = torch.func.functional_call(self._runner, state, args, kwargs)
        self._keep(before, state)
        return self._checked(made, given, rest)

    def _keep(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Write what the module assigned to its buffers into the buffers themselves, which other stages' code holds."""
        with torch.no_grad():
            for name in self.buffers:
                if after[name] is not before[name]:
                    before[name].copy_(after[name])

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
            place = index - len(self.parameters)
            if 0 <= place < len(self.buffers) or place - len(self.buffers) in self.returns.written:
                torch.autograd.graph.increment_version(one)
        return list(_Shapes.apply(self.returns, self.returns.minibatch(rest), *tensors))  # type: ignore[no-untyped-call]


class _Forward(nn.Module):
    """Runs a module's forward() without its hooks: those are in the graph, around the call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


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


Calls = dict[str, tuple[Returns, ...]]
"""For every module that is taken whole what each of its calls returns."""


def learn(model: nn.Module, paths: Sequence[str], run: Callable[[int], Any], minibatches: Sequence[int]) -> Calls:
    """See what the modules return while `run(n)` runs the model on n samples. Raises `Refused` for one that cannot."""
    seen: dict[str, list[list[Seen]]] = {path: [] for path in paths}
    with _unchanged(model):
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
        found[path] = tuple(_returns(path, calls) for calls in zip(*runs, strict=True))
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
        structure, made, _ = Structure.of(value)
        written = tuple(index for index, one in enumerate(tensors) if one._version != before[index])
        calls.append(Seen(minibatch, given, written, structure, tuple(made)))
        return value

    return forward


def _returns(path: str, calls: Sequence[Seen]) -> Returns:
    first = calls[0]
    unknown = next((one for one in first.structure.leaves if not (one is None or isinstance(one, str))), None)
    if unknown is not None:
        # It may be another one with other data, and all that reads it is traced with this one.
        raise Refused(path, f"returns {type(unknown).__name__} beside tensors")
    if any(
        (one.structure.spec, one.structure.places) != (first.structure.spec, first.structure.places) for one in calls
    ):
        raise Refused(path, "returns another structure with another minibatch")
    results = tuple(_result(path, calls, index) for index in range(len(first.made)))
    samples = None
    for tensor, shape in enumerate(first.given):
        for dimension in range(len(shape)):
            size = _size(calls, [one.given[tensor] for one in calls], dimension)
            if size is not None and size.each and (samples is None or size == Size(0, 1) != samples[2]):
                samples = tensor, dimension, size
    if samples is None and any(size.each for one in results for size in one.shape):
        raise Refused(path, "makes tensors that grow with the minibatch from others that do not")
    return Returns(first.structure, results, tuple({index for one in calls for index in one.written}), samples)


def _result(path: str, calls: Sequence[Seen], index: int) -> Result:
    made = [one.made[index] for one in calls]
    if len({(one.dtype, one.ndim) for one in made}) != 1:
        raise Refused(path, "returns tensors of another kind with another minibatch")
    sizes = [_size(calls, [one.shape for one in made], dimension) for dimension in range(made[0].ndim)]
    known = tuple(size for size in sizes if size is not None)
    if len(known) != len(sizes):
        raise Refused(path, "returns sizes that do not follow from the minibatch size")
    return Result(known, made[0].dtype, made[0].requires_grad)


def _size(calls: Sequence[Seen], shapes: Sequence[Sequence[int]], dimension: int) -> Size | None:
    """A size as it depends on the number of samples, by the calls that were seen; None where it does otherwise."""
    if len(calls) == 1:
        return Size(shapes[0][dimension], 0)
    each, rest = divmod(shapes[1][dimension] - shapes[0][dimension], calls[1].minibatch - calls[0].minibatch)
    size = Size(shapes[0][dimension] - each * calls[0].minibatch, each)
    holds = all(size.at(call.minibatch) == shape[dimension] for call, shape in zip(calls, shapes, strict=True))
    return size if not rest and holds else None


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
        state = [one for _, one in module.named_parameters()] + [one for _, one in module.named_buffers()]
        made = record(ModuleCall(path, module, arguments, expected), [*state, *tensors], sizes)
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


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
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
