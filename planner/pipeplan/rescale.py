"""A profile at another minibatch size than its own: as measured there, between two sizes, or in proportion.

With one size known, times and activations are taken to be proportional to the samples, which leaves out what a kernel
takes to start. With several they lie on the line through the two nearest, and beyond them on that line as long as it
neither falls with more samples nor goes below nothing with none: then they are level, or in proportion to the nearest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeplan.profile_data import Layer, Profile, Size, Tensor

_TIMES = ("forward_s", "backward_s", "forward_spread_s", "backward_spread_s")
_BYTES = ("saved_bytes", "workspace_bytes")
_OF_TENSORS = ("bytes", "gradient_bytes")


def sizes_of(profile: Profile) -> list[Size]:
    """All sizes that the profile holds, its own among them, in increasing order."""
    own = Size(profile.minibatch, profile.layers, profile.tensors, profile.whole_forward_s, profile.whole_backward_s)
    return sorted([own, *profile.sizes], key=lambda size: size.minibatch)


def at(profile: Profile, minibatch: int) -> Profile:
    """The profile for minibatches of that many samples; the sizes that it held stay in it."""
    if minibatch == profile.minibatch:
        return profile
    known = sizes_of(profile)
    size = next((one for one in known if one.minibatch == minibatch), None) or _made(known, minibatch)
    return replace(
        profile,
        layers=size.layers,
        tensors=size.tensors,
        minibatch=minibatch,
        whole_forward_s=size.whole_forward_s,
        whole_backward_s=size.whole_backward_s,
        peak_bytes=0,
        sizes=tuple(one for one in known if one.minibatch != minibatch) if profile.sizes else (),
    )


def told(profile: Profile, minibatch: int) -> str:
    """How `at` gets there, for people."""
    known = [size.minibatch for size in sizes_of(profile)]
    if len(known) == 1:
        return f"rescaled linearly from minibatch {profile.minibatch} to {minibatch}"
    if minibatch in known:
        return f"at its minibatch of {minibatch}"
    low, high = _nearest(known, minibatch)
    word = "between" if low < minibatch < high else "beyond"
    return f"at minibatch {minibatch} by the line {word} {low} and {high}"


def _nearest(known: list[int], minibatch: int) -> tuple[int, int]:
    """The two neighbours of a size; the two on that side where it lies beyond all."""
    above = next((index for index, one in enumerate(known) if one > minibatch), len(known) - 1)
    above = max(1, above)
    return known[above - 1], known[above]


@dataclass(frozen=True)
class _Line:
    """From two sizes to a third."""

    low: int
    high: int
    to: int

    def __call__(self, at_low: float, at_high: float) -> float:
        if self.low < self.to < self.high:
            return at_low + (at_high - at_low) * (self.to - self.low) / (self.high - self.low)
        if self.to > self.high:
            nearest, size, other, other_size = at_high, self.high, at_low, self.low
        else:
            nearest, size, other, other_size = at_low, self.low, at_high, self.high
        slope = (nearest - other) / (size - other_size)
        steepest = nearest / size  # with this one nothing is left at no samples
        return nearest + min(max(slope, 0.0), steepest) * (self.to - size)


def _made(known: list[Size], minibatch: int) -> Size:
    by_size = {size.minibatch: size for size in known}
    if len(known) == 1:
        low = high = known[0]
        line: _Line | _Proportion = _Proportion(minibatch / low.minibatch)
    else:
        first, second = _nearest(list(by_size), minibatch)
        low, high = by_size[first], by_size[second]
        line = _Line(first, second, minibatch)
    return Size(
        minibatch,
        tuple(_layer(a, b, line) for a, b in zip(low.layers, high.layers, strict=True)),
        tuple(_tensor(a, b, line) for a, b in zip(low.tensors, high.tensors, strict=True)),
        _whole(low.whole_forward_s, high.whole_forward_s, line),
        _whole(low.whole_backward_s, high.whole_backward_s, line),
    )


@dataclass(frozen=True)
class _Proportion:
    scale: float

    def __call__(self, value: float, same: float) -> float:
        return value * self.scale


def _layer(low: Layer, high: Layer, line: _Line | _Proportion) -> Layer:
    changed: dict[str, Any] = {name: line(getattr(low, name), getattr(high, name)) for name in _TIMES}
    changed |= {name: round(line(getattr(low, name), getattr(high, name))) for name in _BYTES}
    return replace(low, **changed)


def _tensor(low: Tensor, high: Tensor, line: _Line | _Proportion) -> Tensor:
    changed: dict[str, Any] = {name: round(line(getattr(low, name), getattr(high, name))) for name in _OF_TENSORS}
    return replace(low, **changed)


def _whole(low: float | None, high: float | None, line: _Line | _Proportion) -> float | None:
    return None if low is None or high is None else line(low, high)
