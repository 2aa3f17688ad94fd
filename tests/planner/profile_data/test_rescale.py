"""Profiles at other minibatch sizes, against an oracle in exact fractions, written from the page on profiles alone.

The solvers, the evaluator and the checker take the figures of another minibatch from the same code, so that their
agreement says nothing about it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Layer, Size, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.rescale import describe_rescaling, halved

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

    sizes = [Size(one, *figures(one), float(rng.randint(0, 99)), 3.0 * one) for one in minibatches]
    own, *others = sizes
    whole = own.whole_forward_s, own.whole_backward_s
    return Profile(
        own.layers,
        own.tensors,
        own.minibatch,
        peak_bytes=9,
        whole_forward_s=whole[0],
        whole_backward_s=whole[1],
        sizes=tuple(others),
    )


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
            for name in ("whole_forward_s", "whole_backward_s"):
                whole = {size.minibatch: Fraction(getattr(size, name)) for size in profile.all_sizes}
                assert getattr(found, name) == pytest.approx(float(_exact(whole, minibatch)), rel=1e-12)
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


def layers(forward: float, backward: float, saved: int) -> tuple[Layer, ...]:
    return (Layer("a", forward, backward, 100, saved, update_s=3.0, buffer_bytes=7), Layer("b", 1.0, 0.0, 0, 0))


def tensors(size: int) -> tuple[Tensor, ...]:
    return (Tensor("a", "a", ("b",), size, size // 2),)


def several() -> Profile:
    """Measured at 16, 8 and 32: forward 2 + m / 8, backward falls beyond 16, saved bytes 10 m."""
    return Profile(
        layers=layers(4.0, 9.0, 160),
        tensors=tensors(64),
        minibatch=16,
        whole_forward_s=5.0,
        whole_backward_s=9.0,
        peak_bytes=1000,
        sizes=(
            Size(8, layers(3.0, 2.0, 80), tensors(32), 4.0, 2.0),
            Size(32, layers(6.0, 8.0, 320), tensors(128), 7.0, 8.0),
        ),
    )


def times(profile: Profile) -> tuple[float, float]:
    return profile.layers[0].forward_s, profile.layers[0].backward_s


def test_pessimistic_times_are_of_the_nearest_size_or_in_proportion_to_it() -> None:
    def rough(minibatch: int) -> Profile:
        return several().rescaled(minibatch, pessimistic=True)

    assert times(rough(4)) == (3.0, 2.0)
    assert times(rough(1)) == (3.0, 2.0)
    assert times(rough(64)) == (12.0, 16.0)
    assert (rough(4).whole_forward_s, rough(64).whole_backward_s) == (4.0, 16.0)
    # Bytes are no estimate, and sizes between measured ones are interpolated as ever.
    assert (rough(4).layers[0].saved_bytes, rough(4).tensors[0].bytes) == (40, 16)
    assert rough(12) == several().rescaled(12)
    assert rough(8) == several().rescaled(8)
    alone = replace(several(), sizes=())
    assert times(alone.rescaled(4, pessimistic=True)) == (4.0, 9.0)
    assert times(alone.rescaled(32, pessimistic=True)) == (8.0, 18.0)
    for minibatch in (1, 2, 3, 5, 7, 33, 64, 100):
        plain, bound = several().rescaled(minibatch), rough(minibatch)
        assert all(low <= high for low, high in zip(times(plain), times(bound), strict=True))


def test_halves_of_a_size() -> None:
    assert halved(64) == [64, 32, 16, 8]
    assert halved(12) == [12, 6, 3]
    assert halved(7) == [7]
    assert halved(64, 0) == [64]


def test_how_it_gets_there_is_said() -> None:
    one = replace(several(), sizes=())
    assert describe_rescaling(one.all_sizes, 8) == "rescaled linearly from microbatch 16 to 8"
    assert describe_rescaling(several().all_sizes, 8) == "at its microbatch of 8"
    assert describe_rescaling(several().all_sizes, 12) == "at microbatch 12 by the line between 8 and 16"
    assert describe_rescaling(several().all_sizes, 4) == "at microbatch 4 by the line beyond 8 and 16"
    assert describe_rescaling(several().all_sizes, 64) == "at microbatch 64 by the line beyond 16 and 32"


def test_sizes_are_unique() -> None:
    with pytest.raises(InputError, match="microbatch size appears twice: 16, 16"):
        replace(several(), sizes=(replace(several().sizes[0], minibatch=16),))
