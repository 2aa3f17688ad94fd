"""Rescaled profiles against an oracle in exact fractions, written from the page on profiles alone.

The solvers, the evaluator and the checker take the figures of another minibatch from the same code, so that their
agreement says nothing about it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from pipeplan.profile_data.layers import Layer, Size, Tensor
from pipeplan.profile_data.profile import Profile

TIMES = ("forward_s", "backward_s", "forward_spread_s", "backward_spread_s")
BYTES = ("saved_bytes", "workspace_bytes")
KEPT = ("name", "parameter_bytes", "buffer_bytes", "update_s", "module", "op", "like")
SAMPLES = (1, 2, 3, 5, 8, 12, 16, 24, 31, 64, 100)


def _exact(points: dict[int, Fraction], minibatch: int) -> Fraction:
    """The figure at a size: measured there; in proportion to one size; on the line through the two nearest sizes; and
    beyond them on that line, as far as it neither falls nor would be negative without samples."""
    if minibatch in points:
        return points[minibatch]
    sizes = sorted(points)
    if len(sizes) == 1:
        return points[sizes[0]] * Fraction(minibatch, sizes[0])
    inside = sizes[0] < minibatch < sizes[-1]
    if inside:
        low = max(size for size in sizes if size < minibatch)
        high = min(size for size in sizes if size > minibatch)
        share = Fraction(minibatch - low, high - low)
        return points[low] * (1 - share) + points[high] * share
    end, other = (sizes[0], sizes[1]) if minibatch < sizes[0] else (sizes[-1], sizes[-2])
    slope = (points[end] - points[other]) / (end - other)
    through_zero = points[end] / end
    return points[end] + sorted([Fraction(0), slope, through_zero])[1] * (minibatch - end)


def _profile(rng: random.Random) -> Profile:
    """A chain of layers at one to four sizes, with figures that grow, stay or fall from size to size."""
    minibatches = rng.sample([2, 4, 8, 16, 32, 48], rng.randint(1, 4))
    names = [f"l{index}" for index in range(3)]

    def figures(minibatch: int) -> tuple[tuple[Layer, ...], tuple[Tensor, ...]]:
        layers = tuple(
            Layer(
                name,
                *(rng.randint(0, 6) * minibatch + rng.randint(0, 9) for _ in range(2)),
                parameter_bytes=100,
                saved_bytes=rng.randint(0, 50) * minibatch,
                forward_spread_s=rng.randint(0, 3),
                buffer_bytes=7,
                update_s=3.0,
                workspace_bytes=rng.randint(0, 99),
            )
            for name in names
        )
        sent = [Tensor(f"t{i}", names[i], (names[i + 1],), rng.randint(0, 64), rng.randint(0, 64)) for i in range(2)]
        return layers, tuple(sent)

    own, *others = ((minibatch, *figures(minibatch)) for minibatch in minibatches)
    return Profile(own[1], own[2], own[0], peak_bytes=9, sizes=tuple(Size(*other) for other in others))


@pytest.fixture(scope="module")
def profiles() -> list[Profile]:
    """Random profiles, some with several measured sizes."""
    rng = random.Random(3)
    return [_profile(rng) for _ in range(25)]


def test_every_figure_is_that_of_the_oracle(profiles: list[Profile]) -> None:
    for profile in profiles:
        for minibatch in SAMPLES:
            found = profile.rescaled(minibatch)
            assert found.minibatch == minibatch
            for index, layer in enumerate(found.layers):
                known = {size.minibatch: size.layers[index] for size in profile.all_sizes}
                for name in (*TIMES, *BYTES):
                    exact = _exact({size: Fraction(getattr(at, name)) for size, at in known.items()}, minibatch)
                    assert getattr(layer, name) == pytest.approx(float(exact), rel=1e-12, abs=0.5 * (name in BYTES))
                    assert name in TIMES or isinstance(getattr(layer, name), int)
                assert all(getattr(layer, name) == getattr(profile.layers[index], name) for name in KEPT)
            for index, tensor in enumerate(found.tensors):
                ends = {size.minibatch: size.tensors[index] for size in profile.all_sizes}
                for name in ("bytes", "gradient_bytes"):
                    exact = _exact({size: Fraction(getattr(at, name)) for size, at in ends.items()}, minibatch)
                    assert abs(getattr(tensor, name) - exact) <= 0.5
                assert replace(tensor, bytes=0, gradient_bytes=0) == replace(
                    profile.tensors[index], bytes=0, gradient_bytes=0
                )


def test_the_measured_sizes_stay_known(profiles: list[Profile]) -> None:
    for profile in profiles:
        for minibatch in SAMPLES:
            found = profile.rescaled(minibatch)
            if minibatch == profile.minibatch:
                assert found is profile
                continue
            assert found.peak_bytes == 0
            measured = {size.minibatch for size in profile.all_sizes} if profile.sizes else set()
            assert {size.minibatch for size in found.sizes} == measured - {minibatch}
            if minibatch in measured:
                assert found.rescaled(profile.minibatch).layers == profile.layers
