"""Checks before workers start: the installed torch, the plan, the machine and the options."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from toy_workers import stage_contents, write_plan

from pipeplan_launch import preflight, torch_check
from pipeplan_launch.command_line import worker_parser
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.preflight import check_machine, main


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    return load_plan(write_plan(tmp_path, stage_contents([2, 1])))


def test_cpu_workers_may_share_cores_and_it_says_so(plan: LaunchPlan) -> None:
    assert check_machine(plan, {}, core_count=4, gpu_count=0) is None
    assert "3 workers share 2 cores" in (check_machine(plan, {}, core_count=2, gpu_count=0) or "")


def test_too_few_gpus_names_what_does_run(plan: LaunchPlan) -> None:
    plan = replace(plan, device="cuda")
    assert check_machine(plan, {}, core_count=4, gpu_count=3) is None
    with pytest.raises(LaunchError, match=r"3 CUDA devices, and this machine has 2; .*--cluster local --workers 2"):
        check_machine(plan, {}, core_count=4, gpu_count=2)
    with pytest.raises(LaunchError, match=r"this machine has none; .*--workers 4"):
        check_machine(plan, {}, core_count=4, gpu_count=0)


def test_several_servers_need_to_know_each_other(plan: LaunchPlan) -> None:
    plan = replace(plan, servers=2)
    there = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "PIPEPLAN_SECRET": "0123456789abcdef"}
    assert check_machine(plan, there, core_count=8, gpu_count=0) is None
    with pytest.raises(LaunchError, match=r"^several servers need a secret .*set PIPEPLAN_SECRET"):
        check_machine(plan, there | {"PIPEPLAN_SECRET": ""}, core_count=8, gpu_count=0)
    with pytest.raises(LaunchError, match="is shorter than 16 characters"):
        check_machine(plan, there | {"PIPEPLAN_SECRET": "abc"}, core_count=8, gpu_count=0)
    with pytest.raises(LaunchError, match="not set: MASTER_PORT"):
        check_machine(plan, there | {"MASTER_PORT": ""}, core_count=8, gpu_count=0)
    with pytest.raises(LaunchError, match="NODE_RANK is '2'"):
        check_machine(plan, there | {"NODE_RANK": "2"}, core_count=8, gpu_count=0)


def test_an_interface_that_is_not_there_is_named_before_any_worker_starts(plan: LaunchPlan) -> None:
    plan = replace(plan, servers=2)
    there = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "PIPEPLAN_SECRET": "0123456789abcdef"}
    assert check_machine(plan, there | {"GLOO_SOCKET_IFNAME": "lo"}, core_count=8, gpu_count=0) is None
    with pytest.raises(LaunchError, match=r"^GLOO_SOCKET_IFNAME names 'nowhere0', .* interfaces are .*lo.*: set it to"):
        check_machine(plan, there | {"GLOO_SOCKET_IFNAME": "lo,nowhere0"}, core_count=8, gpu_count=0)


def test_the_command_says_one_line_without_torch(tmp_path: Path) -> None:
    folder = write_plan(tmp_path / "a\nb $(x)", stage_contents([1]))
    command = "import sys\nfrom pipeplan_launch.preflight import main\nstatus = main(sys.argv[1:])\n"
    command += "sys.exit(7 if 'torch' in sys.modules else status)"
    done = subprocess.run([sys.executable, "-c", command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "stages" / "stage-0.json").write_text("{")
    done = subprocess.run([sys.executable, "-c", command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
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
    monkeypatch.setattr(preflight, "version_problem", lambda: ("torch is not installed", "pip install it"))
    monkeypatch.setattr(preflight, "gpus", lambda: 0)
    assert main([str(folder)]) == 2
    assert capsys.readouterr().err == "error: running a plan needs torch: torch is not installed; pip install it\n"


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


@pytest.mark.parametrize("option", ["--run-dir", "--resume-from", "--weights"])
def test_folders_that_may_not_be_entered(option: str, tmp_path: Path) -> None:
    plan, closed = write_plan(tmp_path / "plan", stage_contents([1])), tmp_path / "closed"
    closed.mkdir()
    given = worker_parser(prog="launch.sh").parse_args([str(plan), option, str(closed / "a" / "b")])
    known = load_plan(plan)
    closed.chmod(0)
    try:
        with nobody(), pytest.raises(LaunchError, match="failed: Permission denied"):
            preflight.check_run_start(given, known, {}, 1)
    finally:
        closed.chmod(0o700)


def test_a_port_that_is_not_used_may_be_taken(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, stage_contents([1]))
    given, known = worker_parser(prog="launch.sh").parse_args([str(plan)]), load_plan(plan)
    with socket.create_server(("", 0)) as taken:
        environment = {"NODE_RANK": "0", "MASTER_PORT": str(taken.getsockname()[1])}
        preflight.check_run_start(given, known, environment, 1)
        with pytest.raises(LaunchError, match="cannot be used on this machine"):
            preflight.check_run_start(given, known, environment, 2)


@pytest.mark.parametrize(
    ("broken", "said"),
    [("torch", "torch cannot be imported ("), ("torch._dynamo", "torch is broken: torch._dynamo cannot")],
)
def test_what_cannot_be_imported_is_named(broken: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def failing(name: str) -> ModuleType:
        if name == broken:
            raise OSError("libcudart.so.12:\ncannot open shared object file")
        return real(name)

    monkeypatch.setattr(torch_check.importlib, "import_module", failing)
    problem = torch_check.import_problem(torch_check.TRACING)
    assert problem is not None
    assert problem[0].startswith(said)
    assert problem[0].endswith("): libcudart.so.12: cannot open shared object file")


def test_nothing_is_wrong_with_the_torch_of_these_tests() -> None:
    assert torch_check.import_problem(torch_check.TRACING) is None
