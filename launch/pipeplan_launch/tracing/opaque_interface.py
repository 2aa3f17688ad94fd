"""Outputs of opaque modules: tensors whose sizes are constant or linear in the minibatch size.

The sizes are observed, not derived: calls of the unchanged model with minibatches of two sizes must fit one linear
function.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch.tracing.model_outputs import CONSTANT_TYPES, register_dataclasses
from pipeplan_launch.tracing.opaque_calls import ValueStructure

ARGUMENT_TYPES = (type(None), *CONSTANT_TYPES, slice, type(...), torch.layout, torch.memory_format, enum.Enum)
"""Types that an argument of an opaque module may have, in addition to tensors."""


class CannotBeOpaque(Exception):
    """A module cannot be opaque; `why` is the reason."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


@dataclass(frozen=True)
class LinearSize:
    """A size that is linear in the number of samples: `fixed` + `each` · samples."""

    fixed: int
    each: int

    def at(self, samples: Any) -> Any:
        """The size for a number of samples, which may be symbolic."""
        return self.fixed + self.each * samples if self.each else self.fixed

    @staticmethod
    def of(samples: Sequence[int], sizes: Sequence[int]) -> LinearSize | None:
        """The linear function through the sizes at these numbers of samples; None if there is none."""
        other = next((index for index, count in enumerate(samples) if count != samples[0]), None)
        each = 0 if other is None else (sizes[other] - sizes[0]) // (samples[other] - samples[0])
        size = LinearSize(sizes[0] - each * samples[0], each)
        return size if [size.at(count) for count in samples] == list(sizes) else None


@dataclass(frozen=True)
class ObservedCall:
    """One observed call of a module. It holds no tensors, which would keep the activations of the run alive."""

    samples: int
    """Samples in the minibatch."""
    argument_shapes: list[torch.Size]
    """Shapes of the tensors among the arguments."""
    written: set[int]
    """Indices of the argument tensors that the module wrote to."""
    structure: ValueStructure
    returned: list[tuple[torch.Size, torch.dtype, bool]]
    """For each returned tensor its shape, its type, and whether it requires a gradient."""
    replaced: set[int]
    """Indices of the buffers to which the module assigned new tensors."""


@dataclass(frozen=True)
class ReturnedTensor:
    """A tensor that a module returns."""

    shape: tuple[LinearSize, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class CallOutput:
    """The output of one call of a module, at any minibatch size."""

    structure: ValueStructure
    results: tuple[ReturnedTensor, ...]
    written: set[int]
    """Indices of the argument tensors that the module writes to."""
    replaced: set[int]
    """Indices of the buffers to which the module assigns new tensors."""
    samples: tuple[int, int, LinearSize] | None
    """(tensor, dimension, its size): the argument from which the number of samples is read; None if no size depends on
    it."""

    def minibatch(self, tensors: Sequence[Tensor]) -> Any:
        """The number of samples, from the tensors among the arguments of a call."""
        if self.samples is None:
            return 0
        tensor, dimension, size = self.samples
        value = tensors[tensor].shape[dimension]
        return value if size == LinearSize(0, 1) else (value - size.fixed) // size.each


OutputsByModule = dict[str, tuple[CallOutput, ...]]
"""The outputs of each call of every opaque module, by the module's path."""


def observed_forward(
    path: str, module: nn.Module, original: Callable[..., Any], samples: int, calls: list[ObservedCall]
) -> Callable[..., Any]:
    """A forward() that calls the `original` and adds what it sees to `calls`.

    It raises `CannotBeOpaque` for an argument that may hold tensors unseen.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments, tensors, _ = ValueStructure.of((args, kwargs))
        unknown = next((leaf for leaf in arguments.leaves if not isinstance(leaf, ARGUMENT_TYPES)), None)
        if unknown is not None:
            raise CannotBeOpaque(path, f"is given an object of class {type(unknown).__name__}, which may hold tensors")
        shapes, versions = [tensor.shape for tensor in tensors], [tensor._version for tensor in tensors]
        buffers = buffer_places(module)
        value = original(*args, **kwargs)
        register_dataclasses(value)
        structure, returned, _ = ValueStructure.of(value)
        outputs = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in returned]
        written = {index for index, tensor in enumerate(tensors) if tensor._version != versions[index]}
        assigned = [own.get(name) is not tensor and tensor is not None for own, name, tensor in buffers]
        replaced = {index for index, is_new in enumerate(assigned) if is_new}
        calls.append(ObservedCall(samples, shapes, written, structure, outputs, replaced))
        return value

    return forward


def buffer_places(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor | None]]:
    """(dictionary of buffers, name in it, tensor) for every buffer of a module and the modules inside it."""
    return [(one._buffers, name, tensor) for one in module.modules() for name, tensor in one._buffers.items()]


def infer_outputs(path: str, runs: Sequence[Sequence[ObservedCall]]) -> tuple[CallOutput, ...]:
    """The output of each call of a module at any minibatch size, from several runs of the model.

    Raises `CannotBeOpaque` if an output depends on anything other than the minibatch size.
    """
    if len({len(calls) for calls in runs}) != 1:
        raise CannotBeOpaque(path, "is called more or less often with another minibatch")
    if not runs[0]:
        raise CannotBeOpaque(path, "is used in another way than by calling it")
    return tuple(_infer(path, calls) for calls in zip(*runs, strict=True))


def _infer(path: str, calls: Sequence[ObservedCall]) -> CallOutput:
    """The output of one call, from the same call in several runs."""
    structure = calls[0].structure
    unknown = next((leaf for leaf in structure.leaves if not (leaf is None or isinstance(leaf, str))), None)
    if unknown is not None:
        # The value may differ with other data, and every operator that reads it is traced with this value.
        raise CannotBeOpaque(path, f"returns {type(unknown).__name__} beside tensors")
    if any((call.structure.spec, call.structure.places) != (structure.spec, structure.places) for call in calls):
        raise CannotBeOpaque(path, "returns another structure with another minibatch")
    counts = [call.samples for call in calls]
    results = []
    for tensors in zip(*(call.returned for call in calls), strict=True):
        shapes, types, gradients = zip(*tensors, strict=True)
        if len({*map(len, shapes)}) != 1 or len({*types}) != 1:
            raise CannotBeOpaque(path, "returns tensors of another kind with another minibatch")
        sizes = [LinearSize.of(counts, column) for column in zip(*shapes, strict=True)]
        known = tuple(size for size in sizes if size is not None)
        if len(known) != len(sizes):
            raise CannotBeOpaque(path, "returns sizes that do not follow from the minibatch size")
        results.append(ReturnedTensor(known, types[0], any(gradients)))
    candidates = [
        (tensor, dimension, size)
        for tensor, shapes in enumerate(zip(*(call.argument_shapes for call in calls), strict=False))
        for dimension, column in enumerate(zip(*shapes, strict=False))
        if (size := LinearSize.of(counts, column)) is not None and size.each
    ]
    samples = min(candidates, key=lambda one: one[2] != LinearSize(0, 1), default=None)
    if samples is None and any(size.each for result in results for size in result.shape):
        raise CannotBeOpaque(path, "makes tensors that grow with the minibatch from others that do not")
    written = {index for call in calls for index in call.written}
    replaced = {index for call in calls for index in call.replaced}
    return CallOutput(structure, tuple(results), written, replaced, samples)
