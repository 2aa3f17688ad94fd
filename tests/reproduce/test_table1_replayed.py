"""Replays of the table's plans, with a stand-in for what replays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeplan.errors import InputError
from pipeplan.profile_data import Profile
from pipeplan.reproduce import efficiencies, profiles
from pipeplan.reproduce.document import document, errors
from pipeplan.reproduce.experiments import VARIANTS, Needs, Trial
from pipeplan.reproduce.inference import LAYERS
from pipeplan.reproduce.inference import predict as ways
from pipeplan.reproduce.published import row_of
from pipeplan.reproduce.reasons import Reason
from pipeplan.reproduce.replayed import Replay, refuse_foreign, replay
from pipeplan.reproduce.rows import Row, predict
from pipeplan.reproduce.sections import sections
from pipeplan.reproduce.table import Table
from pipeplan.simulation import scenario
from pipeplan.solving import Settings


@dataclass(frozen=True)
class Result:
    measured_s: float
    predicted_s: float
    spread: float = 0.01


@dataclass
class Replayer:
    """Reads each plan folder as the real one does, and measures a tenth more than predicted."""

    seen: list[str] = field(default_factory=list)

    def __call__(self, folder: Path, profile: Profile) -> Result:
        plan = scenario.read(folder)
        assert Profile.load(folder / "profile.json").digest() == profile.digest()
        self.seen.append(plan.config)
        return Result(1.1 * plan.predicted_s, plan.predicted_s)


@pytest.fixture(scope="module")
def row() -> Row:
    published = row_of("s2vt-4x1")
    assert published is not None
    return predict(published, profiles.load(published, None), efficiencies.stated(), Settings(solver="dp"))


def test_four_plans_of_a_row_are_replayed(row: Row, tmp_path: Path) -> None:
    run = Replayer()
    found = replay([row], tmp_path, run, lambda what: None)
    assert [one.plan for one in found] == ["ours", "paper", "data parallel", "straight"]
    assert [one.config for one in found[1:3]] == ["2-1-1", "4"]
    paces = [row.ours.pace_s, row.paper.pace_s, row.parallel.pace_s]
    assert [one.predicted_s for one in found[:3]] == pytest.approx(paces)
    assert [one.error for one in found] == pytest.approx([0.1] * 4)
    assert json.loads((tmp_path / "s2vt-4x1" / "paper" / "plan.json").read_text())["plan"]["config"] == "2-1-1"


def test_what_was_replayed_is_not_replayed_again(row: Row, tmp_path: Path) -> None:
    first, second = Replayer(), Replayer()
    before = replay([row], tmp_path, first, lambda what: None)
    (tmp_path / "s2vt-4x1" / "paper" / "replayed.json").unlink()
    assert replay([row], tmp_path, second, lambda what: None) == before
    assert second.seen == ["2-1-1"]
    assert len(first.seen) == len(set(first.seen))


def _another_cluster(folder: Path) -> None:
    _edit(folder / "plan.json", "cluster", lambda part: part["levels"][1].update(bandwidth=1.0))


def _another_prediction(folder: Path) -> None:
    _edit(folder / "plan.json", "prediction", lambda part: part.update(minibatch_s=part["minibatch_s"] * 1.01))


def _no_profile(folder: Path) -> None:
    document = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({name: document[name] for name in document if name != "profile"}))


def _half_a_plan(folder: Path) -> None:
    (folder / "plan.json").write_text((folder / "plan.json").read_text()[:300])


def _another_file(folder: Path) -> None:
    (folder / "plan.json").write_text("[]")


def _half_a_result(folder: Path) -> None:
    (folder / "replayed.json").write_text((folder / "replayed.json").read_text()[:60])


def _result_of_nothing(folder: Path) -> None:
    document = json.loads((folder / "replayed.json").read_text())
    (folder / "replayed.json").write_text(json.dumps(document | {"predicted_s": 0}))


def _edit(file: Path, part: str, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(file.read_text())
    change(document[part])
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [
        _another_cluster,
        _another_prediction,
        _no_profile,
        _half_a_plan,
        _another_file,
        _half_a_result,
        _result_of_nothing,
    ],
    ids=lambda change: change.__name__,
)
def test_what_is_not_the_same_is_replayed_again(row: Row, tmp_path: Path, change: Callable[[Path], None]) -> None:
    before = replay([row], tmp_path, Replayer(), lambda what: None)
    change(tmp_path / "s2vt-4x1" / "paper")
    (tmp_path / "s2vt-4x1" / "paper" / "stages" / "stage-9.json").write_text("")
    again, third = Replayer(), Replayer()
    assert replay([row], tmp_path, again, lambda what: None) == before
    assert again.seen == ["2-1-1"]
    assert not (tmp_path / "s2vt-4x1" / "paper" / "stages" / "stage-9.json").exists()
    assert replay([row], tmp_path, third, lambda what: None) == before
    assert third.seen == []


def _names(value: Any) -> set[str]:
    """The names of all fields in a document."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return set(value if isinstance(value, dict) else ()).union(*map(_names, inner))


def test_every_field_of_both_formats_is_described(row: Row, tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "file-formats.md").read_text(encoding="utf-8")
    section = next(part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith("Reproduced tables"))
    whole, files = section.split("With `--keep FOLDER`")
    trial = Trial("s2vt-4x1", {one.key: 1.0 for one in VARIANTS}, Needs(None, 1.0, 1.0, None, 1.0))
    replays = tuple(replay([row], tmp_path, Replayer(), lambda what: None))
    reasons = (Reason("s2vt-4x1", "", True),)
    table = Table(efficiencies.stated(), (row,), (trial,), reasons, tuple(ways()), replays)
    made = json.loads(json.dumps(document(table), allow_nan=False))
    written = json.loads((tmp_path / "s2vt-4x1" / "ours" / "replayed.json").read_text())
    # By key and by layer: what `gains` and `shares` are named by is data.
    data = {one.key for one in VARIANTS} | {one.name for one in LAYERS}
    assert {name for name in _names(made) - data if f"`{name}`" not in section} == set()
    assert {name for name in _names(written) if f"`{name}`" not in files} == set()
    for one, part in ((made, whole), (written, files)):
        assert f"`{one['format']}`, `version` {one['version']}" in re.sub(r"\s+", " ", part)
    assert set(made) - {"format", "version"} <= set(re.findall(r"`(\w+)`", whole))


def test_long_straight_pipelines_are_named_by_their_stages() -> None:
    made = [Replay("r", "p", config, 1.0, 1.1, 0.0) for config in ("-".join("1" * 12), "1-1-1-1", "1-2-1-1-1")]
    shown = sections(Table((), (), (), (), (), tuple(made)))[-1]
    assert [cells[2] for cells in shown.cells] == ["straight 12", "1-1-1-1", "1-2-1-1-1"]


def test_errors_are_summed_up() -> None:
    made = [Replay("r", "p", "1", 1.0, measured, 0.0) for measured in (1.02, 0.95, 1.2)]
    assert errors(tuple(made)) == {"median": pytest.approx(0.05), "worst": pytest.approx(0.2)}
    assert errors(()) is None
    failed = Replay("r", "p", "1", 1.0, None, 0.0, "a worker was killed")
    assert errors((failed, made[0])) == {"median": pytest.approx(0.02), "worst": pytest.approx(0.02)}
    assert errors((failed,)) is None


def test_a_replay_that_fails_leaves_the_others(row: Row, tmp_path: Path) -> None:
    def run(folder: Path, profile: Profile) -> Result:
        if scenario.read(folder).config == "4":
            raise InputError("a worker was killed")
        return Result(1.0, 1.0)

    found = {one.plan: one for one in replay([row], tmp_path, run, lambda what: None)}
    assert (found["data parallel"].failure, found["data parallel"].error) == ("a worker was killed", None)
    assert found["paper"].error == 0
    again = Replayer()
    replay([row], tmp_path, again, lambda what: None)
    assert again.seen == ["4"]
    made = sections(Table((), (row,), (), (), (), tuple(found.values())))[-1]
    assert made.after[-1] == "s2vt-4x1, data parallel, was not replayed: a worker was killed"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InputError, match=r"holds thesis.tex, which no replay put there"):
        refuse_foreign(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        refuse_foreign(tmp_path / "thesis.tex")
    refuse_foreign(tmp_path / "new")


@pytest.mark.parametrize(
    "name",
    ["my-photos/one.jpg", "vgg16-4x4", "vgg16-4x4/notes.txt", "vgg16-4x4/other/plan.json", "vgg16-4x4/ours/notes.txt"],
)
def test_a_folder_with_something_else_inside_is_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("")
    with pytest.raises(InputError, match="which no replay put there"):
        refuse_foreign(tmp_path)


def test_what_replays_left_may_be_gone_on_from(row: Row, tmp_path: Path) -> None:
    replay([row], tmp_path, Replayer(), lambda what: None)
    (tmp_path / "vgg16-4x4" / "data-parallel").mkdir(parents=True)
    (tmp_path / "gnmt8-3x4" / "ours").mkdir(parents=True)
    (tmp_path / "gnmt8-3x4" / "ours" / "replayed.json").write_text("")
    refuse_foreign(tmp_path)


@pytest.mark.parametrize("linked", [False, True], ids=["folder", "link"])
def test_only_a_replay_is_ever_removed(row: Row, tmp_path: Path, linked: bool) -> None:
    """Also where somebody put it there after the check at the start."""
    place, theirs = tmp_path / "kept" / "s2vt-4x1" / "paper", tmp_path / "theirs"
    file = (theirs if linked else place) / ("plan.json" if linked else "thesis.tex")
    file.parent.mkdir(parents=True)
    file.write_text("all my work")
    if linked:
        place.parent.mkdir(parents=True)
        place.symlink_to(theirs)
        with pytest.raises(InputError, match="holds s2vt-4x1/paper, which no replay put there"):
            refuse_foreign(tmp_path / "kept")
    found = {one.plan: one for one in replay([row], tmp_path / "kept", Replayer(), lambda what: None)}
    assert "that no replay put there" in found["paper"].failure
    assert file.read_text() == "all my work"
    assert found["ours"].measured_s is not None
