"""Replays of the table's plans, with a stand-in for the replay itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeplan.errors import InputError
from pipeplan.planning.settings import Settings
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation import scenario
from table1 import efficiencies, profiles
from table1.published import row_named
from table1.replays import Replay, error_summary, replay_rows
from table1.rows import Row, predict_row
from table1.sections import sections_of
from table1.table import Table


@dataclass(frozen=True)
class Result:
    measured_s: float
    predicted_s: float
    simulated_s: float | None = None
    spread: float = 0.01


@dataclass
class Replayer:
    """Reads each plan folder as the real replay does, and measures a tenth more than predicted."""

    seen: list[str] = field(default_factory=list)

    def __call__(self, folder: Path, profile: Profile) -> Result:
        plan = scenario.read_scenario(folder)
        assert Profile.load(folder / "profile.json").digest() == profile.digest()
        self.seen.append(plan.config)
        return Result(1.1 * plan.predicted_s, plan.predicted_s, plan.predicted_s)


@pytest.fixture(scope="module")
def row() -> Row:
    published = row_named("s2vt-4x1")
    assert published is not None
    return predict_row(published, profiles.profile_of(published, None), efficiencies.stated(), Settings(solver="dp"))


def test_four_plans_of_a_row_are_replayed(row: Row, tmp_path: Path) -> None:
    run = Replayer()
    found = replay_rows([row], tmp_path, run, lambda step: None)
    assert [one.plan for one in found] == ["ours", "paper", "data parallel", "straight"]
    assert [one.config for one in found[1:3]] == ["2-1-1", "4"]
    paces = [row.ours.pace_s, row.paper.pace_s, row.data_parallel.pace_s]
    assert [one.predicted_s for one in found[:3]] == pytest.approx(paces)
    assert [one.error for one in found] == pytest.approx([0.1] * 4)
    assert json.loads((tmp_path / "s2vt-4x1" / "paper" / "plan.json").read_text())["plan"]["config"] == "2-1-1"


def test_a_finished_replay_does_not_run_again(row: Row, tmp_path: Path) -> None:
    first, second = Replayer(), Replayer()
    before = replay_rows([row], tmp_path, first, lambda step: None)
    (tmp_path / "s2vt-4x1" / "paper" / "replayed.json").unlink()
    assert replay_rows([row], tmp_path, second, lambda step: None) == before
    assert second.seen == ["2-1-1"]
    assert len(first.seen) == len(set(first.seen))


def test_an_interrupted_replay_starts_again(row: Row, tmp_path: Path) -> None:
    before = replay_rows([row], tmp_path, Replayer(), lambda step: None)
    place = tmp_path / "s2vt-4x1" / "paper"
    (place / "replayed.json").unlink()
    (place / "stages" / "stage-9.json").write_text("")
    again = Replayer()
    assert replay_rows([row], tmp_path, again, lambda step: None) == before
    assert again.seen == ["2-1-1"]
    assert not (place / "stages" / "stage-9.json").exists()


def _change_bandwidth(folder: Path) -> None:
    _edit(folder / "plan.json", "cluster", lambda part: part["levels"][1].update(bandwidth=1.0))


def _change_prediction(folder: Path) -> None:
    _edit(folder / "plan.json", "prediction", lambda part: part.update(minibatch_s=part["minibatch_s"] * 1.01))


def _remove_profile(folder: Path) -> None:
    document = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({name: document[name] for name in document if name != "profile"}))


def _truncate_plan(folder: Path) -> None:
    (folder / "plan.json").write_text((folder / "plan.json").read_text()[:300])


def _remove_plan(folder: Path) -> None:
    (folder / "plan.json").unlink()


def _edit(file: Path, part: str, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(file.read_text())
    change(document[part])
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [_change_bandwidth, _change_prediction, _remove_profile, _truncate_plan, _remove_plan],
    ids=lambda change: change.__name__,
)
def test_a_folder_with_anything_but_this_plan_is_left_alone(
    row: Row, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    before = replay_rows([row], tmp_path, Replayer(), lambda step: None)
    place = tmp_path / "s2vt-4x1" / "paper"
    change(place)
    files = {path: path.read_bytes() for path in place.rglob("*.json")}
    again = Replayer()
    after = replay_rows([row], tmp_path, again, lambda step: None)
    assert again.seen == []
    assert "holds something other than this plan" in after[1].failure
    assert (after[0], after[2], after[3]) == (before[0], before[2], before[3])
    assert {path: path.read_bytes() for path in place.rglob("*.json")} == files


def test_long_straight_pipelines_are_named_by_their_stages() -> None:
    made = [Replay("r", "p", config, 1.0, 1.1, 0.0) for config in ("-".join("1" * 12), "1-1-1-1", "1-2-1-1-1")]
    shown = sections_of(Table((), (), (), (), tuple(made)))[-1]
    assert [cells[2] for cells in shown.cells] == ["straight 12", "1-1-1-1", "1-2-1-1-1"]


def test_errors_are_summed_up() -> None:
    made = [Replay("r", "p", "1", 1.0, measured, 0.0) for measured in (1.02, 0.95, 1.2)]
    failed = Replay("r", "p", "1", 1.0, None, 0.0, "a worker was killed")
    assert error_summary(made) == (pytest.approx(0.05), pytest.approx(0.2))
    assert error_summary((failed, made[0])) == (pytest.approx(0.02), pytest.approx(0.02))
    assert error_summary((failed,)) is None


def test_an_error_is_that_of_the_step_time_of_an_answer() -> None:
    for simulated_s, step_s in ((None, 1.0), (1.005, 1.005), (1.2, 1.2), (0.8, 1.0)):
        made = Replay("r", "p", "1", 1.0, 1.2, 0.0, simulated_s=simulated_s)
        assert made.step_s == step_s
        assert made.error == pytest.approx(1.2 / step_s - 1)


def test_a_replay_that_fails_leaves_the_others(row: Row, tmp_path: Path) -> None:
    def run(folder: Path, profile: Profile) -> Result:
        if scenario.read_scenario(folder).config == "4":
            raise InputError("a worker was killed")
        return Result(1.0, 1.0)

    found = {one.plan: one for one in replay_rows([row], tmp_path, run, lambda step: None)}
    assert (found["data parallel"].failure, found["data parallel"].error) == ("a worker was killed", None)
    assert (found["paper"].failure, found["paper"].measured_s) == ("", 1.0)
    again = Replayer()
    replay_rows([row], tmp_path, again, lambda step: None)
    assert again.seen == ["4"]
    made = sections_of(Table((), (row,), (), (), tuple(found.values())))[-1]
    assert made.after[-1] == "s2vt-4x1, data parallel, was not replayed: a worker was killed"
