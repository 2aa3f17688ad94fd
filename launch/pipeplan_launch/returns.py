"""What a module that is taken whole returns: tensors whose sizes are fixed or grow with the minibatch.

That is seen, not derived: the sizes of calls with minibatches of two sizes must agree with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeplan_launch.opaque import Structure


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
    made: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    """For each tensor that it returned: shape, type, and whether it requires a gradient."""


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


Calls = dict[str, tuple[Returns, ...]]
"""For every module that is taken whole what each of its calls returns."""


def returns_of(path: str, calls: Sequence[Seen]) -> Returns:
    """What one call of a module returns at any minibatch size, from the same call in several runs.

    Raises `Refused` where that does not follow from the minibatch size alone.
    """
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
    shapes, types, gradients = zip(*(one.made[index] for one in calls), strict=True)
    if len({*map(len, shapes)}) != 1 or len({*types}) != 1:
        raise Refused(path, "returns tensors of another kind with another minibatch")
    sizes = [_size(calls, shapes, dimension) for dimension in range(len(shapes[0]))]
    known = tuple(size for size in sizes if size is not None)
    if len(known) != len(sizes):
        raise Refused(path, "returns sizes that do not follow from the minibatch size")
    return Result(known, types[0], any(gradients))


def _size(calls: Sequence[Seen], shapes: Sequence[Sequence[int]], dimension: int) -> Size | None:
    """A size as it depends on the number of samples, by the calls that were seen; None where it does otherwise."""
    other = next((index for index, one in enumerate(calls) if one.minibatch != calls[0].minibatch), None)
    each, rest = 0, 0
    if other is not None:
        growth = shapes[other][dimension] - shapes[0][dimension]
        each, rest = divmod(growth, calls[other].minibatch - calls[0].minibatch)
    size = Size(shapes[0][dimension] - each * calls[0].minibatch, each)
    holds = all(size.at(call.minibatch) == shape[dimension] for call, shape in zip(calls, shapes, strict=True))
    return size if not rest and holds else None
