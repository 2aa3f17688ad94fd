"""Profiles: their files, and their times alone and under load."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeplan.errors import InputError
from pipeplan.profile_data.diff import compare_profiles
from pipeplan.profile_data.layers import LOADED_TIMES, Layer, Provenance, Size, Tensor
from pipeplan.profile_data.profile import Profile


def small() -> Profile:
    """a → b → c, with a skip from a to c."""
    return Profile(
        layers=(Layer("a", 1.0, 2.0, 100, 10), Layer("b", 0.5, 1.0, 0, 4), Layer("c", 0.25, 0.5, 40, 6)),
        tensors=(Tensor("x", "a", ("b", "c"), 8, 8), Tensor("y", "b", ("c",), 4, 0)),
        minibatch=4,
        model_name="small",
        together=(("a", "b"),),
    )


WRONG: tuple[tuple[tuple[Any, ...], Any, str], ...] = (
    (("layers", 1, "forward_s"), -1.0, r"layers\[1\] \('b'\): forward_s: expected at least 0"),
    (("layers", 1, "backward_s"), math.nan, r"layers\[1\] \('b'\): backward_s: expected a finite number"),
    (("layers", 0, "name"), "half \ud800", "half a character"),
    (("layers",), [], "no layers"),
    (("layers", 2, "name"), "b", "layer 'b' appears 2 times"),
    (("tensors", 0, "producer"), "z", "dangling edge: there is no layer 'z'"),
    (("tensors", 1, "consumers"), ["a"], "cycle: "),
    (("tensors", 1, "consumers"), ["b"], "cycle: b → b"),
    (("together",), [["a", "q"]], "does not exist: 'q'"),
    (("version",), 99, "version 99 of pipeplan-profile; this pipeplan reads up to 1"),
    (("version",), 0, "version: expected at least 1"),
    (("format",), "other", "is not a pipeplan-profile file"),
    (("provenance",), None, "provenance"),
)
"""The place of a field, a wrong value, and the complaint."""


def test_a_wrong_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for (*keys, last), value, complaint in WRONG:
        document = place = json.loads(json.dumps(small().to_json()))
        for key in keys:
            place = place[key]
        place[last] = value
        path.write_text(json.dumps(document))
        with pytest.raises(InputError, match=complaint) as caught:
            Profile.load(path)
        assert "profile.json" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_truncated_file_is_said_to_be(tmp_path: Path) -> None:
    small().save(tmp_path / "p.json")
    whole = (tmp_path / "p.json").read_text()
    for length in (0, 1, 50, len(whole) // 2, len(whole) - 3):
        (tmp_path / "p.json").write_text(whole[:length])
        with pytest.raises(InputError, match="truncated"):
            Profile.load(tmp_path / "p.json")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("list", "binary", "deep", "absent"):
        with pytest.raises(InputError, match=f"{name}.json"):
            Profile.load(tmp_path / f"{name}.json")


def test_an_unwritable_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        small().save(tmp_path / "file" / "p.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def layer(name: str, scale: float) -> Layer:
    loaded = dict(zip(LOADED_TIMES, (1.5 * scale, 4.0 * scale, scale), strict=True))
    return Layer(name, scale, 2 * scale, 4, 4, update_s=scale / 2, **loaded)  # type: ignore[arg-type]


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
