"""What `pipeplan doctor` says of a machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import Run
from small_plans import outcome

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.local import Hardware
from pipeplan.first_steps import doctor
from pipeplan.first_steps.doctor import MISSING, OK, WARNING, DoctorFinding
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.rendering.plan_folder import write_plan

WELL = {"torch": "2.13.0", "cuda": None, "cuda_devices": 0, "nccl": None, "gloo": "", "sklearn": "1.5.0"}
CARDS = [Hardware("A100", "cuda", 40 * 2**30, 1)] * 2


def asked(
    monkeypatch: pytest.MonkeyPatch, cards: list[Hardware] | None = None, **answer: Any
) -> dict[str, DoctorFinding]:
    """What is said where the executor answers this."""
    monkeypatch.setattr(doctor, "_ask", lambda: WELL | answer)
    monkeypatch.setattr(doctor, "local_gpus", lambda: cards or [])
    return {one.name: one for one in doctor.check_torch()}


def test_a_machine_without_gpus_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch)
    assert list(found) == ["torch", "CUDA", "Gloo", "scikit-learn"]
    assert {one.state for one in found.values()} == {OK}


def test_every_kind_of_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Hardware("T4", "cuda", 16 * 2**30, 1)
    monkeypatch.setattr(doctor, "local_gpus", lambda: [*CARDS, small])
    assert doctor.check_devices().found == "2 × A100, 40 GiB each; 1 × T4, 16 GiB"


def test_torch_that_cannot_be_used_is_missing_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch, torch=None, error="torch 2.1.0 is too old", todo="pip install 'torch>=2.11'")
    assert (found["torch"].state, found["torch"].found) == (MISSING, "torch 2.1.0 is too old")
    assert found["torch"].todo == "pip install 'torch>=2.11'"
    assert "Gloo" not in found
    broken = asked(monkeypatch, torch=None, error="torch cannot be imported: libc", todo="")["torch"]
    assert broken.todo.startswith("install it anew")


def self_tested(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> list[DoctorFinding]:
    """What is said where the self-test prints this."""
    done = subprocess.CompletedProcess([], 0, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    return doctor.run_self_test()


def test_a_self_test_is_a_line_for_every_run_and_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        {"name": "1-1, gpipe", "passed": True, "text": "16 losses equal", "seconds": 3.2},
        {"name": "1-1, 2bw, nccl", "passed": False, "text": "it hung", "seconds": 25.0},
        {"name": "messages, host", "passed": True, "text": "9 µs for a small one, 8 Gbit/s", "seconds": 0.0},
    ]
    report = {"results": runs, "hardware": "2 GPUs", "transport": "gloo", "remembered": "/cache/selftest.json"}
    found = self_tested(monkeypatch, f"noise\n{json.dumps(report)}\n")
    assert [(one.name, one.state) for one in found] == [
        ("1-1, gpipe", OK),
        ("1-1, 2bw, nccl", MISSING),
        ("messages, host", OK),
        ("self-test", OK),
    ]
    assert found[0].found == "16 losses equal (3 s)"
    assert found[-1].found == (
        "1 of 3 failed on 2 GPUs; messages travel by --transport gloo, remembered in /cache/selftest.json"
    )


def test_a_self_test_that_gives_no_answer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = self_tested(monkeypatch, "", "Traceback\nImportError: no torch")
    assert (found.state, found.found) == (MISSING, "ImportError: no torch")


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        ({"cuda": "12.8", "cuda_devices": 2, "nccl": "2.27"}, OK, "12.8, torch sees 2 devices"),
        ({"cuda": "12.8", "cuda_devices": 1, "nccl": "2.27"}, OK, "nvidia-smi has 2: see CUDA_VISIBLE_DEVICES"),
        ({"cuda": "12.8"}, WARNING, "torch has CUDA 12.8, but sees none of them"),
        ({}, WARNING, "this build of torch has no CUDA"),
    ],
)
def test_what_torch_sees_of_two_gpus(
    answer: dict[str, Any], state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked(monkeypatch, CARDS, **answer)
    assert found["CUDA"].state == state
    assert words in found["CUDA"].found
    assert ("NCCL" in found) == bool(answer.get("cuda_devices"))


def test_gloo_and_nccl_and_the_digits_may_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch, CARDS, cuda="12.8", cuda_devices=2, gloo="connect failed", sklearn=None)
    assert (found["Gloo"].state, found["NCCL"].state, found["scikit-learn"].state) == (MISSING, WARNING, WARNING)
    assert "connect failed" in found["Gloo"].found
    assert all(found[name].todo for name in ("Gloo", "NCCL", "scikit-learn"))


def test_ports() -> None:
    assert doctor.check_port({}).state == OK
    with socket.create_server(("", 0)) as taken:
        number = str(taken.getsockname()[1])
        found = doctor.check_port({"MASTER_PORT": number})
    assert (found.state, number in found.found) == (MISSING, True)
    assert doctor.check_port({"MASTER_PORT": "http"}).state == MISSING


def test_threads_that_the_prediction_does_not_have() -> None:
    assert doctor.check_threads({}).state == OK
    found = doctor.check_threads({"OMP_NUM_THREADS": "4"})
    assert (found.state, "--threads 4" in found.todo) == (WARNING, True)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_folder(tmp_path).state == OK
    assert doctor.check_folder(tmp_path / "gone").state == MISSING
    assert doctor.check_shared_memory(tmp_path / "gone").state == WARNING
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30, 2**20))
    assert [
        one.state
        for one in (
            doctor.check_folder(tmp_path),
            doctor.check_temporary_folder(),
            doctor.check_shared_memory(tmp_path),
        )
    ] == [WARNING] * 3


def test_an_old_python_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_python().state == OK
    monkeypatch.setattr(doctor, "OLDEST", (99, 0))
    assert doctor.check_python().state == MISSING


@pytest.mark.parametrize(("state", "code"), [(OK, 0), (WARNING, 0), (MISSING, 2)])
def test_the_exit_code_says_whether_anything_needed_is_missing(
    state: str, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [DoctorFinding("torch", "training", state, "as found", "do this")]
    monkeypatch.setattr("pipeplan.cli.commands.doctor.examine_machine", lambda plan: found)
    done = run("doctor")
    assert (done.code, done.err) == (code, "")
    first, *rest = done.out.splitlines()
    assert first.split() == [state, "torch", "as", "found"]
    assert ("needed for training: do this" in rest[0]) == (state != OK)
    assert done.out.endswith("Missing: torch.\n" if code else "Nothing that is needed is missing.\n")
    assert json.loads(run("doctor", "--json").out) == [found[0].to_json()]


def test_a_plan_s_part_here(tmp_path: Path) -> None:
    made = pipeplan.solve(
        pipeplan.read_profile("mnist-v100"),
        pipeplan.cluster("B"),
        settings=pipeplan.Settings(solver="dp", simulate=False),
    )
    pipeplan.render(made, tmp_path / "plan")
    empty = doctor.check_plan_here(tmp_path)
    assert (empty.state, "pipeplan solve" in empty.todo) == (MISSING, True)
    damaged = tmp_path / "plan" / "stages" / "stage-0.json"
    damaged.write_text("{")
    found = doctor.check_plan_here(tmp_path / "plan")
    assert found.state == MISSING
    assert "stage-0.json" in found.found
    assert not found.found.startswith("error")


def test_a_plan_for_several_servers_is_looked_at_as_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES", "WORKERS"):
        monkeypatch.delenv(name, raising=False)
    cluster = Cluster("two", Device("core", "cpu", 10_000), (Level("server", 1, 100.0), Level("cluster", 2, 10.0)))
    write_plan(solve(Problem(outcome().problem.profile, cluster), pipeplan.Settings()), tmp_path / "plan")
    found = doctor.check_plan_here(tmp_path / "plan")
    assert (found.state, found.found) == (OK, f"{tmp_path}/plan can run here")
    monkeypatch.setenv("NODE_RANK", "7")
    assert "NODE_RANK is '7'" in doctor.check_plan_here(tmp_path / "plan").found


@pytest.mark.slow
def test_on_this_machine(tmp_path: Path) -> None:
    """With a real torch, whose two processes do talk over the loopback interface."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MASTER_PORT", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-m", "pipeplan", "doctor", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert done.returncode == 0, found
    assert found["torch"]["state"] == found["Gloo"]["state"] == OK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_gloo_is_tried_for_real() -> None:
    """On a machine whose loopback interface is down. What the user exported for other runs makes no difference."""
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and network namespaces for all users")
    command = [sys.executable, "-m", "pipeplan_launch.capabilities"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "nowhere0"}
    said = [
        json.loads(subprocess.run([*prefix, *command], capture_output=True, text=True, env=environment).stdout)["gloo"]
        for prefix in ([], alone)
    ]
    assert said[0] == ""
    assert said[1] != ""
