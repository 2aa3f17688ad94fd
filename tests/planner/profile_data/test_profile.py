"""Profiles: their files, their times alone and under load, and the layers that share weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoders import decoder, problem

from pipeplan.errors import InputError
from pipeplan.profile_data.diff import compare_profiles
from pipeplan.profile_data.layers import LOADED_TIMES, Layer, Provenance, Size, Tensor, edges
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import HeldLayers, held_layers


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


def test_a_file_that_is_no_profile_is_named_and_an_unwritable_place_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    small().save(path)
    whole = path.read_bytes()
    for content, said in (
        *((whole[:length], "truncated") for length in (0, 1, 50, len(whole) // 2, len(whole) - 3)),
        (b"[1, 2]", "p.json"),
        (b"\xff\xfe\x00", "p.json"),
        (b"[" * 100_000, "p.json"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=said):
            Profile.load(path)
    with pytest.raises(InputError, match="cannot write"):
        small().save(path / "p.json")
    assert [one.name for one in tmp_path.iterdir()] == ["p.json"]


def test_the_times_follow_the_number_of_busy_workers() -> None:
    assert LOADED.under_load(1) is LOADED
    assert times(LOADED.under_load(4))[0] == (1.5, 4.0, 1.0)
    assert times(LOADED.under_load(4)) == times(LOADED.under_load(9))
    assert times(LOADED.under_load(2))[0] == pytest.approx((1 + 0.5 / 3, 2 + 2 / 3, 0.5 + 0.5 / 3))
    assert LOADED.under_load(4).step_s == pytest.approx(0.5), "it grows like the rest of the step"
    assert times(LOADED.under_load(4).rescaled(4))[1] == (9.0, 24.0, 6.0)
    for size in (4, 6, 16):
        either = times(LOADED.rescaled(size).under_load(3)), times(LOADED.under_load(3).rescaled(size))
        assert either[0] == [pytest.approx(one) for one in either[1]]
    found = LOADED.under_load(3)
    assert (found.provenance.processes, found.provenance.load_processes) == (3, 0)
    assert found.under_load(2) is found
    assert not any(getattr(one, name) for one in found.layers for name in LOADED_TIMES)
    diff = compare_profiles(LOADED, LOADED.without_load())
    assert [total.loaded_s for total in diff.totals] == [5.5 * 11, 0.0]


def test_the_file_has_both_or_says_nothing_of_them(tmp_path: Path) -> None:
    LOADED.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == LOADED
    plain = LOADED.without_load()
    assert times(plain) == times(LOADED)
    text = json.dumps(replace(plain, step_s=0.0).to_json())
    assert not any(word in text for word in (*LOADED_TIMES, "load_processes", "step_s"))


def held(names: str, arrows: str, *groups: str) -> list[HeldLayers]:
    return held_layers(
        list(names), [(arrow[0], arrow[1]) for arrow in arrows.split()], [list(group) for group in groups]
    )


def test_layers_between_a_group_are_counted_and_groups_that_overlap_are_one() -> None:
    row = "ab bc cd de"
    assert held("abcde", row, "bd") == [HeldLayers(("b", "d"), 1, 2)]
    assert held("abcde", row, "ab") == [HeldLayers(("a", "b"), 0, 3)]
    assert held("abcde", row) == []
    assert held("abcde", row, "ac", "bd") == [HeldLayers(("a", "b", "c", "d"), 0, 1)]
    apart = [HeldLayers(("a", "c"), 0, 3), HeldLayers(("b", "d"), 0, 3)]
    assert held("abcde", "ac ce bd de", "ac", "bd") == apart
    assert HeldLayers(("a", "b"), 0, 0).text() == (
        "'a' and 'b' have weights or memory in common and stay in one stage; there is no place to cut"
    )
    said = "'a', 'b', 'c' and 2 more have the weights w in common and stay in one stage with the 1 layer between them"
    assert HeldLayers(tuple("abcde"), 1, 7).text("the weights w").startswith(said)


def test_groups_are_the_units_that_a_problem_makes() -> None:
    profile = decoder(3, tied=True)
    (one,) = held_layers([layer.name for layer in profile.layers], edges(profile.tensors), profile.together)
    sizes = sorted(len(unit.layers) for unit in problem(profile).units)
    assert sizes == [1] * one.others + [len(one.group) + one.between]
