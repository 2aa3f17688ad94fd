"""Profiles: their files and jobs, their times alone and under load, and the layers that share weights."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoders import decoder, problem
from reported import branching, small_cluster

from pipeplan.errors import InputError
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem import plan_file
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.diff import compare_profiles
from pipeplan.profile_data.layers import LOADED_TIMES, Layer, Provenance, Size, Tensor, edges
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.profile_document import job_notes
from pipeplan.profile_data.ties import HeldLayers, held_layers
from pipeplan.rendering import plan_folder
from pipeplan.rendering.launcher import TemplateContext
from pipeplan_launch.job_reference import JobFile, file_digest
from pipeplan_launch.plan.stage_files import load_plan


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
