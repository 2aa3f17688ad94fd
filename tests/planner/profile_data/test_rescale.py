"""Profiles at other minibatch sizes: what was measured there, what lies between, and what lies beyond."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Layer, Size, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.rescale import describe_rescaling, halved


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


@pytest.mark.parametrize(("minibatch", "expected"), [(8, (3.0, 2.0)), (16, (4.0, 9.0)), (32, (6.0, 8.0))])
def test_a_measured_size_is_what_was_measured(minibatch: int, expected: tuple[float, float]) -> None:
    found = several().rescaled(minibatch)
    assert times(found) == expected
    assert found.minibatch == minibatch
    assert found.layers[0].saved_bytes == 10 * minibatch
    assert (found.tensors[0].bytes, found.tensors[0].gradient_bytes) == (4 * minibatch, 2 * minibatch)
    assert (found.layers[0].parameter_bytes, found.layers[0].buffer_bytes, found.layers[0].update_s) == (100, 7, 3.0)
    assert found.whole_forward_s == expected[0] + 1.0


def test_between_two_sizes_there_is_a_line() -> None:
    found = several().rescaled(12)
    assert times(found) == (3.5, 5.5)
    assert (found.layers[0].saved_bytes, found.tensors[0].bytes, found.whole_backward_s) == (120, 48, 5.5)
    assert times(several().rescaled(24)) == (5.0, 8.5)


def test_beyond_them_it_neither_falls_nor_goes_below_nothing() -> None:
    assert times(several().rescaled(48)) == (8.0, 8.0)
    # Forward has 2 left at no samples; backward, by its line, would have less than nothing: it is in proportion.
    assert times(several().rescaled(4)) == (2.5, 1.0)
    for minibatch in (1, 2, 3, 100, 10_000):
        assert all(time >= 0 for time in times(several().rescaled(minibatch)))


def test_a_rescaled_profile_still_knows_what_was_measured() -> None:
    once = several().rescaled(12)
    assert once.peak_bytes == 0
    assert times(once.rescaled(8)) == (3.0, 2.0)
    back = several().rescaled(8).rescaled(16)
    assert (back.layers, back.tensors, back.whole_forward_s) == (several().layers, several().tensors, 5.0)
    assert {size.minibatch for size in several().rescaled(8).sizes} == {16, 32}


def test_one_size_is_scaled_in_proportion_and_stays_one() -> None:
    found = replace(several(), sizes=()).rescaled(8)
    assert times(found) == (2.0, 4.5)
    assert found.sizes == ()


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


def test_sizes_survive_the_file_and_are_unique(tmp_path: Path) -> None:
    several().save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == several()
    with pytest.raises(InputError, match="microbatch size appears twice: 16, 16"):
        replace(several(), sizes=(replace(several().sizes[0], minibatch=16),))
