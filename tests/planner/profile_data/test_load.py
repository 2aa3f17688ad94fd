"""A profile's times alone and under load: kept in its file, and taken by the number of busy workers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.profile_data.diff import compare_profiles
from pipeplan.profile_data.layers import LOADED_TIMES, Layer, Provenance, Size, Tensor
from pipeplan.profile_data.profile import Profile


def layer(name: str, scale: float) -> Layer:
    times = (scale * one for one in (1.0, 2.0, 0.5, 1.5, 4.0, 1.0))
    forward, backward, update, loaded_forward, loaded_backward, loaded_update = times
    return Layer(
        name,
        forward,
        backward,
        4,
        4,
        update_s=update,
        loaded_forward_s=loaded_forward,
        loaded_backward_s=loaded_backward,
        loaded_update_s=loaded_update,
    )


TENSORS = (Tensor("a", "a", ("b",), 8, 8),)
LOADED = Profile(
    (layer("a", 1.0), layer("b", 10.0)),
    TENSORS,
    8,
    provenance=Provenance(load_processes=4),
    step_s=0.25,
    sizes=(Size(4, (layer("a", 0.5), layer("b", 6.0)), TENSORS),),
)


def times(profile: Profile) -> list[tuple[float, float, float]]:
    return [(one.forward_s, one.backward_s, one.update_s) for one in profile.layers]


def test_the_times_follow_the_number_of_busy_workers() -> None:
    assert LOADED.under_load(1) is LOADED
    assert times(LOADED.under_load(4))[0] == (1.5, 4.0, 1.0)
    assert times(LOADED.under_load(4)) == times(LOADED.under_load(9))
    assert times(LOADED.under_load(2))[0] == pytest.approx((1 + 0.5 / 3, 2 + 2 / 3, 0.5 + 0.5 / 3))
    assert LOADED.under_load(4).step_s == pytest.approx(0.5), "it grows like the rest of the step"
    assert times(LOADED.under_load(4).rescaled(4))[1] == (9.0, 24.0, 6.0)


def test_what_is_taken_is_a_profile_of_as_many_processes() -> None:
    found = LOADED.under_load(3)
    assert (found.provenance.processes, found.provenance.load_processes) == (3, 0)
    assert found.under_load(2) is found
    assert not any(getattr(one, name) for one in found.layers for name in LOADED_TIMES)


def test_rescaling_and_taking_the_load_go_in_either_order() -> None:
    for size in (4, 6, 16):
        assert times(LOADED.rescaled(size).under_load(3)) == [
            pytest.approx(one) for one in times(LOADED.under_load(3).rescaled(size))
        ]


def test_the_file_has_both_or_says_nothing_of_them(tmp_path: Path) -> None:
    LOADED.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == LOADED
    plain = LOADED.without_load()
    assert times(plain) == times(LOADED)
    text = json.dumps(replace(plain, step_s=0.0).to_json())
    assert not any(word in text for word in (*LOADED_TIMES, "load_processes", "step_s"))


def test_two_profiles_are_compared_under_load_too() -> None:
    diff = compare_profiles(LOADED, LOADED.without_load())
    assert [total.loaded_s for total in diff.totals] == [5.5 * 11, 0.0]
