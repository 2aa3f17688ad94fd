"""The published figures, compared with a copy of them where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeplan.errors import InputError
from table1 import profiles
from table1.published import FITTED, ROWS, row_named
from table1.table import rows_named


def test_the_rows_are_those_of_the_paper(reference: Path) -> None:
    file = reference / "table1.json"
    if not file.is_file():
        pytest.skip(f"no {file} to compare with")
    facts = json.loads(file.read_text(encoding="utf-8"))
    ours = [[row.model, row.shape, row.cluster, row.config, row.speedup, row.to_accuracy] for row in ROWS]
    assert ours == facts["rows"]
    sizes = facts["notes"]["minibatch_per_gpu"]
    for row in ROWS:
        assert row.minibatch == sizes["GNMT" if row.model.startswith("GNMT") else row.model]


def test_replicas_of_every_row_fill_its_workers() -> None:
    assert all(sum(row.replicas) == row.workers for row in ROWS)
    assert [row.name for row in ROWS if row.data_parallel] == ["resnet50-4x4", "resnet50-2x8", "gnmt8-2x8"]
    assert len({row.name for row in ROWS}) == 14
    assert all(row_named(name) is not None for name in FITTED.values())


def test_rows_are_chosen_by_name() -> None:
    assert [row.name for row in rows_named("vgg16-2x8, vgg16-4x4")] == ["vgg16-4x4", "vgg16-2x8"]
    assert rows_named(None) == ROWS
    with pytest.raises(InputError, match="there is no row 'vgg16-4x8'; did you mean"):
        rows_named("vgg16-4x8")


def test_profiles_are_the_published_ones_where_they_are(reference: Path) -> None:
    folder = profiles.folder_of(reference)
    found = {row.profile: profiles.profile_of(row, folder) for row in ROWS}
    assert {name for name, source in found.items() if not source.published} == {"awd-lm", "s2vt"}
    assert {source.profile.minibatch for source in found.values()} == {64, 80, 128, 256}
    assert found["vgg16"].text == "published at 128, scaled to 64"
    assert found["gnmt8"].profile.total_s == pytest.approx(2 * 0.0894, rel=0.001)
    # The first dimension of the decoder's state says what a minibatch was: 1024 numbers of 4 bytes a sample.
    for name, state in (("gnmt8", 131_072), ("gnmt16", 524_288)):
        assert state == profiles.MEASURED_AT[name] * 1024 * 4
        assert f"{state}.0" in (reference / "pipedream" / f"{name}.txt").read_text(encoding="utf-8")


def test_without_them_the_bundled_ones_are_taken(tmp_path: Path) -> None:
    source = profiles.profile_of(ROWS[0], profiles.folder_of(None))
    assert (source.published, source.text) == (False, "estimated at 64")
    with pytest.raises(InputError, match=r"has no pipedream/vgg16\.txt"):
        profiles.folder_of(tmp_path)
