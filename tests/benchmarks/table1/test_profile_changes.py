"""Corrections of published profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from table1 import profile_changes, profiles
from table1.published import row_named

ROW = row_named("gnmt8-3x4")
assert ROW is not None


def gnmt() -> Profile:
    """The layers of a GNMT whose profiler put two backward times into their neighbours."""
    made = [
        ("Embedding(32320", 0.1, 7.0, 100),
        ("EmuBidirLSTM", 5.0, 0.0, 60),
        ("Embedding(32320", 0.1, 0.3, 100),
        ("LSTM(2048", 3.0, 5.0, 50),
        ("LSTM(2048", 3.0, 16.0, 50),
        ("Classifier", 6.0, 1.0, 130),
    ]
    layers = tuple(Layer(f"l{i}", f, b, w, 0, op=op) for i, (op, f, b, w) in enumerate(made))
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), 480, 480) for i in range(5))
    return Profile(layers, tensors, 64)


def test_backward_times_go_back_where_they_belong() -> None:
    before, after = gnmt(), profile_changes.repaired(ROW, gnmt())
    assert [layer.backward_s for layer in after.layers] == pytest.approx([0.3, 6.7, 0.3, 5.0, 5.0, 12.0])
    assert after.total_s == pytest.approx(before.total_s)
    assert {tensor.bytes for tensor in after.tensors} == {480 * 31 // 48}


def test_other_profiles_need_no_repair() -> None:
    plain = replace(gnmt(), layers=tuple(replace(one, op="Linear") for one in gnmt().layers))
    assert profile_changes.repaired(ROW, plain) is plain
    vgg = row_named("vgg16-4x4")
    assert vgg is not None
    assert profile_changes.repaired(vgg, gnmt()) == gnmt()


def test_a_published_profile_is_repaired_by_its_own_figures(reference: Path) -> None:
    before = profiles.profile_of(ROW, profiles.folder_of(reference)).profile
    after = profile_changes.repaired(ROW, before)
    changed = [one.op.split("(")[0] for one, other in zip(before.layers, after.layers, strict=True) if one != other]
    assert sorted(changed) == ["Classifier", "Embedding", "EmuBidirLSTM", "LSTM"]
    assert after.total_s == pytest.approx(before.total_s)
    ratios = [one.backward_s / one.forward_s for one in after.layers if one.op.startswith(("Emu", "Classifier"))]
    assert all(1 < ratio < 2.5 for ratio in ratios), "like other layers: backward takes one to two times forward"


def test_a_step_reads_and_writes_the_weights() -> None:
    with_adam = profile_changes.with_step(gnmt(), {"gnmt8": 2.0}, ROW)
    plain = profile_changes.with_step(gnmt(), {}, ROW)
    rate = 900e9 * 0.93
    assert with_adam.layers[0].update_s == pytest.approx(22 * 100 / rate)
    assert plain.layers[5].update_s == pytest.approx(14 * 130 / rate)
