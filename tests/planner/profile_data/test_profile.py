import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Layer, Tensor
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


def broken(tmp_path: Path, change: Any) -> Path:
    """The profile's file after `change` has been made to its document."""
    document = json.loads(json.dumps(small().to_json()))
    change(document)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    return path


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    small().save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == small()
    assert Profile.load(tmp_path / "p.json").digest() == small().digest()


def test_rescaling_is_linear_in_times_and_activations_only() -> None:
    doubled = small().rescaled(8)
    assert doubled.minibatch == 8
    assert doubled.total_s == pytest.approx(2 * small().total_s)
    assert [layer.saved_bytes for layer in doubled.layers] == [20, 8, 12]
    assert [layer.parameter_bytes for layer in doubled.layers] == [100, 0, 40]
    assert [tensor.bytes for tensor in doubled.tensors] == [16, 8]


def _set(*path: Any) -> Any:
    *keys, last, value = path

    def change(document: Any) -> None:
        for key in keys:
            document = document[key]
        document[last] = value

    return change


def _drop(*path: Any) -> Any:
    *keys, last = path

    def change(document: Any) -> None:
        for key in keys:
            document = document[key]
        del document[last]

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_set("layers", 1, "forward_s", -1.0), r"layers\[1\] \('b'\): forward_s: expected at least 0"),
        (_set("layers", 1, "backward_s", math.nan), r"layers\[1\] \('b'\): backward_s: expected a finite number"),
        (_set("layers", 0, "parameter_bytes", 1.5), "expected a whole number"),
        (_set("layers", 0, "parameter_bytes", 10**400), "at most 9007199254740992"),
        (_set("layers", 0, "forward_s", 1e308), "at most 9.22337e\\+18"),
        (_set("layers", 0, "name", "half \ud800"), "half a character"),
        (_set("layers", 0, "forward_s", "fast"), "expected a number, found 'fast'"),
        (_set("layers", 0, "forward_s", True), "expected a number, found True"),
        (_set("layers", []), "no layers"),
        (_set("layers", {}), "expected a list"),
        (_set("layers", 2, "name", "b"), "layer 'b' appears 2 times"),
        (_set("tensors", 0, "producer", "z"), "dangling edge: there is no layer 'z'"),
        (_set("tensors", 1, "consumers", ["a"]), "cycle: "),
        (_set("tensors", 1, "consumers", ["b"]), "cycle: b → b"),
        (_set("together", [["a", "q"]]), "does not exist: 'q'"),
        (_set("version", 99), "version 99 of pipeplan-profile; this pipeplan reads up to 1"),
        (_set("version", 0), "version: expected at least 1"),
        (_set("format", "other"), "is not a pipeplan-profile file"),
        (_set("minibatch", 0), "minibatch: expected at least 1"),
        (_drop("layers", 0, "saved_bytes"), "'saved_bytes' is missing"),
        (_drop("provenance"), "'provenance' is missing"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as caught:
        Profile.load(broken(tmp_path, change))
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


def test_a_number_of_too_many_digits_is_said_to_be(tmp_path: Path) -> None:
    small().save(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(text.replace('"minibatch": 4', '"minibatch": ' + "9" * 5000))
    with pytest.raises(InputError, match="too many digits"):
        Profile.load(tmp_path / "p.json")


def test_an_unwritable_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        small().save(tmp_path / "file" / "p.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
