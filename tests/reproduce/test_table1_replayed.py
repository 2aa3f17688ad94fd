"""Replays of the table's plans, with a stand-in for what replays."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeplan.errors import InputError
from pipeplan.profile import Profile
from pipeplan.reproduce import efficiencies, profiles
from pipeplan.reproduce.document import errors
from pipeplan.reproduce.published import row_of
from pipeplan.reproduce.replayed import Replay, refuse_foreign, replay
from pipeplan.reproduce.rows import Row, predict
from pipeplan.reproduce.sections import sections
from pipeplan.reproduce.table import Table
from pipeplan.simulate import scenario
from pipeplan.solve import Settings


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


def test_another_plan_in_its_place_is_replayed(row: Row, tmp_path: Path) -> None:
    replay([row], tmp_path, Replayer(), lambda what: None)
    file = tmp_path / "s2vt-4x1" / "paper" / "plan.json"
    document = json.loads(file.read_text())
    document["cluster"]["levels"][1]["bandwidth"] *= 2
    file.write_text(json.dumps(document))
    again = Replayer()
    replay([row], tmp_path, again, lambda what: None)
    assert again.seen == ["2-1-1"]


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
