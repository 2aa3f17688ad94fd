"""The profile of a plan is found where it lay when the plan was made, and in the usual places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reported import branching, small_cluster

from pipeplan.errors import InputError
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem import plan_file
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan in one folder, made from a profile in another; the current folder has neither."""
    for name in ("data", "work", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "data")
    branching().save("model.json")
    profile = Profile.load("model.json")
    outcome = solve(Problem(profile, small_cluster(), Options()), Settings(solver="dp", certify=False, simulate=False))
    plan_folder.write_plan(outcome, tmp_path / "work" / "plan")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_it_is_found_by_its_path(elsewhere: Path) -> None:
    plan = elsewhere / "work" / "plan"
    recorded = json.loads((plan / "plan.json").read_text())["profile"]["path"]
    assert recorded == str(elsewhere / "data" / "model.json")
    problem, _ = plan_file.read_plan(plan)
    assert problem.profile == branching()
    assert problem.profile.file == recorded


def test_a_copy_beside_the_plan_serves_as_well(elsewhere: Path) -> None:
    (elsewhere / "data" / "model.json").rename(elsewhere / "work" / "profile.json")
    problem, _ = plan_file.read_plan(elsewhere / "work" / "plan")
    assert problem.profile.file == str(elsewhere / "work" / "profile.json")


def test_a_profile_that_changed_or_is_gone_is_named(elsewhere: Path) -> None:
    plan = elsewhere / "work" / "plan"
    branching(5).save(elsewhere / "data" / "model.json")
    with pytest.raises(InputError, match=r"no longer at .*data/model.json, nor beside the plan: name it"):
        plan_file.read_plan(plan)
    with pytest.raises(InputError, match="their digests differ"):
        plan_file.read_plan(plan, elsewhere / "data" / "model.json")
    Path("profile.json").write_text("{")
    with pytest.raises(InputError, match=r"profile.json is not valid JSON"):
        plan_file.read_plan(plan)


@pytest.mark.parametrize("pessimistic", [False, True])
def test_an_extrapolated_size_is_found_by_either_way_of_scaling(elsewhere: Path, pessimistic: bool) -> None:
    profile = Profile.load(elsewhere / "data" / "model.json")
    scaled = profile.rescaled(profile.minibatch * 3, pessimistic=pessimistic)
    outcome = solve(Problem(scaled, small_cluster(), Options()), Settings(solver="dp", certify=False, simulate=False))
    plan_folder.write_plan(outcome, Path("plan"))
    assert plan_file.read_plan(Path("plan"))[0].profile == scaled
