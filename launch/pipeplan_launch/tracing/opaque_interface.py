"""Outputs of opaque modules: tensors whose sizes are constant or linear in the minibatch size.

The sizes are observed, not derived: calls with minibatches of two sizes must fit one linear function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeplan_launch.tracing.opaque_calls import ValueStructure


class CannotBeOpaque(Exception):
    """A module cannot be opaque; `why` is the reason."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


@dataclass(frozen=True)
class ObservedCall:
    """One observed call of a module."""

    minibatch: int
    """Samples in the minibatch."""
    argument_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors among the arguments."""
    written: tuple[int, ...]
    """Indices of the argument tensors that the module wrote to."""
    structure: ValueStructure
    outputs: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    """For each returned tensor its shape, its type, and whether it requires a gradient."""
    replaced: tuple[int, ...]
    """Indices of the buffers to which the module assigned new tensors."""


@dataclass(frozen=True)
class LinearSize:
    """A size that is linear in the number of samples: `fixed` + `each` · samples."""

    fixed: int
    each: int

    def at(self, samples: Any) -> Any:
        """The size for a number of samples, which may be symbolic."""
        return self.fixed + self.each * samples if self.each else self.fixed


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
    written: tuple[int, ...]
    """Indices of the argument tensors that the module writes to."""
    replaced: frozenset[int] = frozenset()
    """Indices of the buffers to which the module assigns new tensors."""
    samples: tuple[int, int, LinearSize] | None = field(default=None)
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


def infer_call_output(path: str, calls: Sequence[ObservedCall]) -> CallOutput:
    """The output of a call at any minibatch size, inferred from the same call in several runs.

    Raises `CannotBeOpaque` if the output depends on anything other than the minibatch size.
    """
    first = calls[0]
    unknown = next((leaf for leaf in first.structure.leaves if not (leaf is None or isinstance(leaf, str))), None)
    if unknown is not None:
        # The value may differ with other data, and every operator that reads it is traced with this value.
        raise CannotBeOpaque(path, f"returns {type(unknown).__name__} beside tensors")
    if any(
        (call.structure.spec, call.structure.places) != (first.structure.spec, first.structure.places) for call in calls
    ):
        raise CannotBeOpaque(path, "returns another structure with another minibatch")
    results = tuple(_result(path, calls, index) for index in range(len(first.outputs)))
    samples = None
    for tensor, shape in enumerate(first.argument_shapes):
        for dimension in range(len(shape)):
            size = _size(calls, [call.argument_shapes[tensor] for call in calls], dimension)
            if size is not None and size.each and (samples is None or size == LinearSize(0, 1) != samples[2]):
                samples = tensor, dimension, size
    if samples is None and any(size.each for result in results for size in result.shape):
        raise CannotBeOpaque(path, "makes tensors that grow with the minibatch from others that do not")
    written = tuple({index for call in calls for index in call.written})
    replaced = frozenset(index for call in calls for index in call.replaced)
    return CallOutput(first.structure, results, written, replaced, samples)


def _result(path: str, calls: Sequence[ObservedCall], index: int) -> ReturnedTensor:
    shapes, types, gradients = zip(*(call.outputs[index] for call in calls), strict=True)
    if len({*map(len, shapes)}) != 1 or len({*types}) != 1:
        raise CannotBeOpaque(path, "returns tensors of another kind with another minibatch")
    sizes = [_size(calls, shapes, dimension) for dimension in range(len(shapes[0]))]
    known = tuple(size for size in sizes if size is not None)
    if len(known) != len(sizes):
        raise CannotBeOpaque(path, "returns sizes that do not follow from the minibatch size")
    return ReturnedTensor(known, types[0], any(gradients))


def _size(calls: Sequence[ObservedCall], shapes: Sequence[Sequence[int]], dimension: int) -> LinearSize | None:
    """A size as a linear function of the number of samples, from the observed calls; None if it is not linear."""
    other = next((index for index, call in enumerate(calls) if call.minibatch != calls[0].minibatch), None)
    each, rest = 0, 0
    if other is not None:
        growth = shapes[other][dimension] - shapes[0][dimension]
        each, rest = divmod(growth, calls[other].minibatch - calls[0].minibatch)
    size = LinearSize(shapes[0][dimension] - each * calls[0].minibatch, each)
    holds = all(size.at(call.minibatch) == shape[dimension] for call, shape in zip(calls, shapes, strict=True))
    return size if not rest and holds else None
