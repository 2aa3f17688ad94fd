"""A plan finds its profile, and a profile its job: by paths, and by their content."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
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
from pipeplan.profile_data.profile_document import job_notes
from pipeplan.rendering import plan_folder
from pipeplan.rendering.launcher import TemplateContext
from pipeplan_launch.job_reference import JobFile, file_digest
from pipeplan_launch.plan.stage_files import load_plan


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a job, its profile, and a plan of it."""
    folder = tmp_path / "project"
    folder.mkdir()
    job = folder / "job.py"
    job.write_text("def build(): ...\n")
    file = JobFile(str(job), file_digest(job))
    replace(branching(), model_ref=f"{job}:build", model_file=file).save(folder / "profile.json")
    planned(folder / "profile.json", folder / "plan")
    return folder


def planned(profile: Path | Profile, folder: Path) -> Path:
    loaded = profile if isinstance(profile, Profile) else Profile.load(profile)
    problem = Problem(loaded, small_cluster(), Options())
    outcome = solve(problem, Settings(solver="dp", certify=False, simulate=False, compare=False))
    plan_folder.write_plan(outcome, folder)
    return folder


def written_ref(plan: Path) -> str:
    return str(json.loads((plan / "stages" / "stage-0.json").read_text())["model"]["ref"])


def test_paths_are_from_the_folder_of_each_file(project: Path, tmp_path: Path) -> None:
    assert json.loads((project / "profile.json").read_text())["model"]["ref"] == "job.py:build"
    assert written_ref(project / "plan") == "../job.py:build"
    outside = planned(project / "profile.json", tmp_path / "elsewhere" / "plan")
    assert written_ref(outside) == "../../project/job.py:build"
    (tmp_path / "alone").mkdir()
    shutil.copy(project / "profile.json", tmp_path / "alone")
    os.symlink(project, tmp_path / "link")
    read = [Profile.load(tmp_path / folder / "profile.json").model_ref for folder in ("project", "alone", "link")]
    assert [*read, load_plan(outside).model_ref] == [f"{project}/job.py:build"] * 4
    assert written_ref(planned(tmp_path / "link" / "profile.json", tmp_path / "link" / "new")) == "../job.py:build"
    for ref in ("/gone/job.py:build", "package.module:build", "mnist"):  # as older versions wrote them, and modules
        profile = replace(branching(), model_ref=ref)
        profile.save(tmp_path / "profile.json")
        assert json.loads((tmp_path / "profile.json").read_text())["model"]["ref"] == ref
        assert Profile.load(tmp_path / "profile.json") == profile


def test_a_copied_project_has_its_own_job_and_profile(project: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(project, copy)
    (copy / "job.py").write_text("def build(): return 1\n")
    problem, _ = plan_file.read_plan(copy / "plan")
    assert problem.profile.file == str(copy / "profile.json")
    assert problem.profile.model_ref == f"{copy}/job.py:build"
    notes = list(job_notes(problem.profile.model_ref, problem.profile.model_file))
    assert notes == [
        f"the job is {copy}/job.py, and not {project}/job.py, which was profiled: the two files differ",
        "job.py has changed since it was profiled, so its layers may take other times",
    ]
    again = planned(copy / "profile.json", copy / "again")
    recorded = load_plan(again).model_file
    assert recorded is not None
    assert recorded.path == f"{copy}/job.py"
    assert recorded.digest == file_digest(project / "job.py"), "the digest stays that of what was profiled"
    root = plan_file.read_plan_document(copy / "plan")
    assert TemplateContext.of(root, plan_folder=str(copy / "plan")).model_ref == f"{copy}/job.py:build"


def test_a_moved_project_is_the_same_profile(project: Path, tmp_path: Path) -> None:
    digest = Profile.load(project / "profile.json").digest()
    moved = Profile.load(project.rename(tmp_path / "moved") / "profile.json")
    assert moved.digest() == digest
    assert list(job_notes(moved.model_ref, moved.model_file)) == []
    (tmp_path / "moved" / "job.py").write_text("")
    changed = replace(moved, model_file=JobFile("", file_digest(tmp_path / "moved" / "job.py")))
    assert changed.digest() != digest


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan in one folder, made from a profile in another; the current folder has neither."""
    for name in ("data", "work", "here"):
        (tmp_path / name).mkdir()
    branching().save(tmp_path / "data" / "model.json")
    planned(tmp_path / "data" / "model.json", tmp_path / "work" / "plan")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_an_extrapolated_size_is_found_by_either_way_of_scaling(elsewhere: Path) -> None:
    profile = Profile.load(elsewhere / "data" / "model.json")
    for pessimistic in (False, True):
        scaled = profile.rescaled(profile.minibatch * 3, pessimistic=pessimistic)
        assert plan_file.read_plan(planned(scaled, Path(f"plan-{pessimistic}")))[0].profile == scaled


def test_a_profile_is_found_by_its_path_or_beside_the_plan_or_named_as_gone(elsewhere: Path) -> None:
    plan, recorded = elsewhere / "work" / "plan", elsewhere / "data" / "model.json"
    assert json.loads((plan / "plan.json").read_text())["profile"]["path"] == str(recorded)
    problem, _ = plan_file.read_plan(plan)
    assert (problem.profile, problem.profile.file) == (branching(), str(recorded))
    beside = recorded.rename(elsewhere / "work" / "profile.json")
    assert plan_file.read_plan(plan)[0].profile.file == str(beside)
    beside.unlink()
    branching(5).save(recorded)
    with pytest.raises(InputError, match=r"no longer at .*data/model.json, nor beside the plan: name it"):
        plan_file.read_plan(plan)
    with pytest.raises(InputError, match="their digests differ"):
        plan_file.read_plan(plan, recorded)
    Path("profile.json").write_text("{")
    with pytest.raises(InputError, match=r"profile.json is not valid JSON"):
        plan_file.read_plan(plan)
