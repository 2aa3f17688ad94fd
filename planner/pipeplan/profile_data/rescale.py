"""Computes the layers and tensors of a profile at a minibatch size at which they were not measured.

If one size is known, times and activations count as proportional to the number of samples, which ignores the fixed
cost of launching a kernel. If several sizes are known, figures are interpolated on the line through the two nearest
sizes. Beyond the known sizes, that line is extended with a limited slope, so that a time neither falls with more
samples nor becomes negative at zero samples.

Pessimistic times are for choices among sizes, so that no size is chosen for a speed that was not measured. Below the
smallest known size, a minibatch takes as long as at the smallest size. Above the largest known size, a sample takes as
long as at the largest size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pipeplan.profile_data.layers import Layer, Size, Tensor

HALVINGS = 3
"""Largest number of times that schedules with smaller minibatches halve the profile's minibatch."""

_SCALED_TIMES = {
    *("forward_s", "backward_s", "forward_spread_s", "backward_spread_s", "loaded_forward_s", "loaded_backward_s")
}
_SCALED_BYTES = {"saved_bytes", "workspace_bytes", "bytes", "gradient_bytes"}
_Record = TypeVar("_Record", Layer, Tensor)

_Interpolation = Callable[[float, float], float]
"""A function from the figures at the lower and the higher of two known sizes to the figure at the wanted size."""


def halved(minibatch: int, halvings: int = HALVINGS) -> list[int]:
    """The minibatch size, halved up to `halvings` times while it stays a whole number, in samples, largest first."""
    return [minibatch >> times for times in range(halvings + 1) if minibatch % (1 << times) == 0]


def size_at(known: Sequence[Size], minibatch: int, *, pessimistic: bool = False) -> Size:
    """The layers and tensors for minibatches of `minibatch` samples: measured if this size was, else interpolated.

    `known` holds the measured sizes in increasing order. Parameters, buffers and the optimiser's step do not depend on
    the size and stay unchanged. With `pessimistic`, times beyond the known sizes are upper bounds.
    """
    measured = next((size for size in known if size.minibatch == minibatch), None)
    if measured is not None:
        return measured
    low, high = _neighbours(known, minibatch)
    line = _linear(low.minibatch, high.minibatch, minibatch)
    beyond = not known[0].minibatch < minibatch < known[-1].minibatch
    times = _bound(known, minibatch) if pessimistic and beyond else line
    return Size(
        minibatch,
        tuple(_record(a, b, times, line) for a, b in zip(low.layers, high.layers, strict=True)),
        tuple(_record(a, b, times, line) for a, b in zip(low.tensors, high.tensors, strict=True)),
        _optional(low.whole_forward_s, high.whole_forward_s, times),
        _optional(low.whole_backward_s, high.whole_backward_s, times),
        _optional(low.whole_split_s, high.whole_split_s, times),
    )


def describe_rescaling(known: Sequence[Size], minibatch: int) -> str:
    """A phrase that tells the user how `size_at` obtains the figures."""
    if any(size.minibatch == minibatch for size in known) and len(known) > 1:
        return f"at its microbatch of {minibatch}"
    low, high = (size.minibatch for size in _neighbours(known, minibatch))
    if len(known) == 1:
        return f"rescaled linearly from microbatch {low} to {minibatch}"
    word = "between" if low < minibatch < high else "beyond"
    return f"at microbatch {minibatch} by the line {word} {low} and {high}"


def _neighbours(known: Sequence[Size], minibatch: int) -> tuple[Size, Size]:
    """The two known sizes around a size, or the two nearest sizes if it lies beyond all known sizes.

    If only one size is known, the result has that size twice.
    """
    above = next((index for index, size in enumerate(known) if size.minibatch > minibatch), len(known) - 1)
    above = min(max(1, above), len(known) - 1)
    return known[max(0, above - 1)], known[above]


def _bound(known: Sequence[Size], minibatch: int) -> _Interpolation:
    """The largest plausible time at a size beyond all known sizes, from the times at the two nearest sizes."""
    if minibatch < known[0].minibatch:
        return lambda low, high: low
    return lambda low, high: high * minibatch / known[-1].minibatch


def _linear(low: int, high: int, wanted: int) -> _Interpolation:
    """The line through the figures at sizes `low` and `high`, with a limited slope if `wanted` lies beyond them.

    If both are the same size, figures are proportional to the number of samples.
    """
    if low == high:
        scale = wanted / low
        return lambda at_low, _: at_low * scale

    def between(at_low: float, at_high: float) -> float:
        return at_low + (at_high - at_low) * (wanted - low) / (high - low)

    def beyond(at_low: float, at_high: float) -> float:
        nearest, size = (at_high, high) if wanted > high else (at_low, low)
        slope = (at_high - at_low) / (high - low)
        steepest = nearest / size  # a steeper line would be negative at zero samples
        return nearest + min(max(slope, 0.0), steepest) * (wanted - size)

    return between if low < wanted < high else beyond


def _record(low: _Record, high: _Record, times: _Interpolation, sizes: _Interpolation) -> _Record:
    """A layer or a tensor with interpolated times and sizes."""
    changed: dict[str, Any] = {}
    for name in _SCALED_TIMES & vars(low).keys():
        changed[name] = times(getattr(low, name), getattr(high, name))
    for name in _SCALED_BYTES & vars(low).keys():
        changed[name] = round(sizes(getattr(low, name), getattr(high, name)))
    return replace(low, **changed)


def _optional(low: float | None, high: float | None, line: _Interpolation) -> float | None:
    return None if low is None or high is None else line(low, high)
