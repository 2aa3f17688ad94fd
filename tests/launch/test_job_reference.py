"""Which file of a job a profile or plan means, after its project was moved, copied, edited or linked."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from toy_workers import stage_contents, write_plan

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job_reference import (
    JobFile,
    canonical_reference,
    change_note,
    job_file,
    portable_reference,
    relative_reference,
)
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.preflight import check_job, main


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a job and a plan of it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.py").write_text("def build(): ...\n")
    written(folder / "plan", f"{folder}/job.py:build")
    return folder


def written(plan: Path, ref: str) -> Path:
    """A plan folder whose job is `ref`, as the planner writes it."""
    model = {"ref": relative_reference(ref, plan)}
    if recorded := job_file(ref):
        model["file"] = asdict(recorded)
    contents = [content | {"model": content["model"] | model} for content in stage_contents([1, 1])]
    return write_plan(plan, contents)


def test_references_are_canonical_and_portable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link keeps its name, as a copy may have a file there."""
    monkeypatch.chdir(tmp_path)
    assert canonical_reference("job.py:make") == f"{tmp_path / 'job.py'}:make"
    assert canonical_reference("mnist") == "mnist"
    assert canonical_reference("package.module:make") == "package.module:make"
    assert portable_reference("/a/b/job.py:make") == "job.py:make"
    assert portable_reference("package.module:make") == "package.module:make"
    (tmp_path / "job.py").symlink_to(tmp_path / "shared.py")
    assert canonical_reference(f"{tmp_path}/job.py:make") == f"{tmp_path}/job.py:make"


def test_a_copied_and_edited_project_runs_the_copy_and_says_so(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(project, copy)
    assert check_job(load_plan(copy / "plan")) is None, "the files are equal"
    (copy / "job.py").write_text("def build(): return 1\n")
    plan = load_plan(copy / "plan")
    assert plan.model_ref == f"{copy}/job.py:build"
    monkeypatch.setenv("WORKERS", "2")
    assert main([str(copy / "plan")]) == 0
    note = f"note: the job is {copy}/job.py, and not {project}/job.py, which was profiled: the two files differ"
    assert note in capsys.readouterr().err.splitlines()
    now = job_file(plan.model_ref)
    assert change_note(plan.model_ref, plan.model_file, now) == "job.py has changed since it was profiled"
    assert change_note(plan.model_ref, now, now) is None


def test_a_plan_finds_its_job_wherever_either_was_moved(project: Path, tmp_path: Path) -> None:
    """A plan that was moved alone, one outside of the project, and one behind a link; then the whole project."""
    for folder in ("a/b", "x/y"):
        (tmp_path / folder).mkdir(parents=True)
    outside = written(tmp_path / "elsewhere" / "plan", f"{project}/job.py:build")
    (tmp_path / "x/y/link").symlink_to(outside)
    alone = shutil.copytree(project / "plan", tmp_path / "a/b/plan")
    for plan in (outside, tmp_path / "x/y/link", Path(alone)):
        assert load_plan(plan).model_ref == f"{project}/job.py:build"
    moved = project.rename(tmp_path / "moved")
    found = load_plan(moved / "plan")
    assert found.model_ref == f"{moved}/job.py:build"
    assert check_job(found) is None
    (moved / "job.py").unlink()
    with pytest.raises(LaunchError, match=f"not at {moved}/job.py, nor at {project}/job.py: put it there"):
        check_job(load_plan(moved / "plan"))


def test_older_plans_with_an_absolute_path_and_modules_stay_as_they_are(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(project)
    for number, ref in enumerate((f"{project}/job.py:build", "job.py:build")):
        contents = [one | {"model": one["model"] | {"ref": ref}} for one in stage_contents([1, 1])]
        plan = load_plan(write_plan(tmp_path / str(number), contents))
        assert (plan.model_ref, plan.model_file) == (f"{project}/job.py:build", None)
    assert load_plan(written(tmp_path / "module", "json:loads")).model_ref == "json:loads"


def test_the_file_of_a_module_is_told_by_its_content() -> None:
    recorded = job_file("json:loads")
    assert recorded == JobFile(str(sys.modules["json"].__file__), recorded.digest if recorded else "")
    assert job_file("mnist") is None
    assert job_file("no.such.module:build") is None
