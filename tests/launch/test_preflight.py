"""Checks before workers start: torch, the plan and its job, this server, the options, and lines for terminals."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from toy_workers import stage_contents, write_plan

from pipeplan_launch import preflight, torch_check
from pipeplan_launch.command_line import worker_parser
from pipeplan_launch.errors import LaunchError, print_status, terminal_line
from pipeplan_launch.job_reference import (
    JobFile,
    canonical_reference,
    change_note,
    job_file,
    portable_reference,
    relative_reference,
)
from pipeplan_launch.launchers.hosts_file import read_hosts
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.preflight import check_job, check_machine, main, workers_to_start

THERE = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "PIPEPLAN_SECRET": "0123456789abcdef"}
FIRST = THERE | {"NODE_RANK": "0"}
THIRD = THERE | {"NODE_RANK": "2", "NNODES": "3", "WORKERS": "1"}
"""Of three launches, one for every worker."""


def plan_of(folder: Path, **changes: Any) -> LaunchPlan:
    """Stages of 2 and 1 workers, on one server of three unless told otherwise."""
    return load_plan(write_plan(folder, [content | changes for content in stage_contents([2, 1])]))


UNEVEN = {"servers": 2, "workers_per_server": 2, "server_sizes": [2, 1]}


def test_what_a_machine_must_have_for_a_plan(tmp_path: Path) -> None:
    one, two, uneven = plan_of(tmp_path), plan_of(tmp_path, servers=2), plan_of(tmp_path, **UNEVEN)
    gpus, uneven_gpus = replace(one, device="cuda"), replace(uneven, device="cuda")
    good: list[tuple[LaunchPlan, dict[str, str], int, int]] = [
        (one, {}, 4, 0),
        (gpus, {}, 4, 3),
        (two, THERE | {"GLOO_SOCKET_IFNAME": "lo"}, 8, 0),
        (uneven, THERE, 1, 0),
        (uneven_gpus, THERE, 4, 1),
        (uneven, THIRD, 1, 0),
    ]
    for plan, environment, cores, count in good:
        assert check_machine(plan, environment, core_count=cores, gpu_count=count) is None
    assert "3 workers share 2 cores" in (check_machine(one, {}, core_count=2, gpu_count=0) or "")
    assert "2 workers share 1 core" in (check_machine(uneven, FIRST, core_count=1, gpu_count=0) or "")
    bad: list[tuple[LaunchPlan, dict[str, str], int, str]] = [
        (gpus, {}, 2, r"3 CUDA devices, and this machine has 2; .*--cluster local --workers 2"),
        (two, THERE | {"MASTER_PORT": ""}, 0, "not set: MASTER_PORT"),
        (uneven, THERE | {"NODE_RANK": "2"}, 0, "NODE_RANK is '2'"),
        (two, THERE | {"MASTER_PORT": "ssh"}, 0, "MASTER_PORT is 'ssh': it must be a free port"),
        (uneven, {}, 0, r"spans 2 servers of 2 and 1 workers: run launch\.sh on each"),
        (uneven_gpus, FIRST, 0, "needs 2 CUDA devices on server 0, and this machine has none"),
        (uneven_gpus, {}, 0, "needs 2 CUDA devices on its largest server"),
        (uneven, THIRD | {"NODE_RANK": "3"}, 0, "NODE_RANK is '3': it must be this server's number, 0 to 2"),
        (uneven, THIRD | {"NNODES": "x"}, 0, "NNODES is 'x'"),
        (uneven, {"NNODES": "1", "WORKERS": "1"}, 0, "the plan has 3 workers, and this launch alone would start 1"),
        (one, THERE, 0, "NODE_RANK is '1', and the plan uses one server only: run launch.sh there, once"),
    ]
    for plan, environment, count, says in bad:
        with pytest.raises(LaunchError, match=says):
            check_machine(plan, environment, core_count=4, gpu_count=count)


def test_how_many_workers_start_here(tmp_path: Path) -> None:
    """WORKERS; else the size of the server that has so many GPUs; else that of server NODE_RANK."""
    plan = plan_of(tmp_path, device="cuda", **UNEVEN)
    assert (plan.world, [plan.workers_on(server) for server in (0, 1)]) == (3, [2, 1])
    assert [workers_to_start(plan, FIRST, gpus) for gpus in (1, 2, 3)] == [1, 2, 2]
    assert [workers_to_start(plan, THERE, gpus) for gpus in (0, 1, 2, 8)] == [1, 1, 2, 1]
    assert workers_to_start(plan, {}, 0) == 2
    assert workers_to_start(plan, THERE | {"WORKERS": "3"}, 1) == 3
    for wrong in ("0", "two", "-1", "4"):
        with pytest.raises(LaunchError, match="WORKERS is"):
            workers_to_start(plan, THERE | {"WORKERS": wrong}, 1)


def test_impossible_sizes_of_servers_are_refused(tmp_path: Path) -> None:
    for sizes in ([2], [2, 0], [3, 1], [2, True], ["2", 1], [2, 1.5]):
        with pytest.raises(LaunchError, match=r"stage-0.json: server_sizes(\[[01]\])?: expected"):
            plan_of(tmp_path, **UNEVEN | {"server_sizes": sizes})
    with pytest.raises(LaunchError, match="worker 2 does not exist: 2 servers of 1, 1 workers have workers 0 to 1"):
        plan_of(tmp_path, **UNEVEN | {"server_sizes": [1, 1]})


def test_the_command_says_one_line_without_torch(tmp_path: Path) -> None:
    folder = write_plan(tmp_path / "a\nb $(x)", stage_contents([1]))
    command = "import sys\nfrom pipeplan_launch.preflight import main\nstatus = main(sys.argv[1:])\n"
    command += "sys.exit(7 if 'torch' in sys.modules else status)"
    for status in (0, 2):
        done = subprocess.run([sys.executable, "-c", command, str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        (folder / "stages" / "stage-0.json").write_text("{")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_torch_that_is_missing_or_broken_is_said_before_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_plan(tmp_path, [content | {"device": "cuda"} for content in stage_contents([1])])
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(preflight, "version_problem", lambda: None)
    assert main([str(folder)]) == 2
    assert "running a plan needs torch, and importing it failed: " in capsys.readouterr().err


@contextmanager
def nobody() -> Iterator[None]:
    """As somebody who may not enter every folder, where tests are run by root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_folders_that_may_not_be_entered(tmp_path: Path) -> None:
    plan, closed = write_plan(tmp_path / "plan", stage_contents([1])), tmp_path / "closed"
    known = load_plan(plan)
    closed.mkdir()
    closed.chmod(0)
    try:
        for option in ("--run-dir", "--resume-from", "--weights"):
            given = worker_parser(prog="launch.sh").parse_args([str(plan), option, str(closed / "a" / "b")])
            with nobody(), pytest.raises(LaunchError, match="failed: Permission denied"):
                preflight.check_run_start(given, known, {})
    finally:
        closed.chmod(0o700)


def test_what_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_check.import_problem(torch_check.TRACING) is None
    real = importlib.import_module

    def failing(name: str) -> ModuleType:
        if name == "torch._dynamo":
            raise OSError("libcudart.so.12:\ncannot open shared object file")
        return real(name)

    monkeypatch.setattr(torch_check.importlib, "import_module", failing)
    problem = torch_check.import_problem(torch_check.TRACING)
    assert problem is not None
    assert problem[0].startswith("torch is broken: torch._dynamo cannot")
    assert problem[0].endswith("): libcudart.so.12: cannot open shared object file")


EVIL = "a\x1b[2J\x9b31m\u202eb\u2066\nc\x07\u2028d"


def test_no_line_changes_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal_line(EVIL) == "a\ufffd[2J\ufffd31m\ufffdb\ufffd c\ufffd d"
    assert terminal_line("größer → 多") == "größer → 多"
    print_status(EVIL)
    assert capsys.readouterr().err == f"{terminal_line(EVIL)}\n"


def test_hosts_that_are_no_file_are_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "endless").open("wb") as file:
        file.truncate(2**40)
    for path in (tmp_path, Path("/dev/zero"), *(tmp_path / name for name in ("pipe", "endless", "missing"))):
        with pytest.raises(LaunchError, match=f"^cannot read {path}: ") as caught:
            read_hosts(str(path))
        assert "\n" not in str(caught.value)


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
