"""What a new user begins with: pipeplan init, and what pipeplan doctor says of a machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, refused
from small_plans import servers_of

import pipeplan
from pipeplan.cli.profile.measure import _next
from pipeplan.cluster_data import local
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.cluster_toml import read_cluster
from pipeplan.cluster_data.local import Hardware, local_cluster
from pipeplan.first_steps import doctor, init
from pipeplan.first_steps.doctor import MISSING, OK, WARNING, DoctorFinding
from pipeplan.planning.solve import solve
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


def test_devices_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch)
    assert list(found) == ["torch", "CUDA", "Gloo", "scikit-learn"]
    assert {one.state for one in found.values()} == {OK}
    asked(monkeypatch, [*CARDS, Hardware("T4", "cuda", 16 * 2**30, 1)])
    assert doctor.check_devices().found == "2 × A100, 40 GiB each; 1 × T4, 16 GiB"
    found = asked(monkeypatch, torch=None, error="torch 2.1.0 is too old", todo="pip install 'torch>=2.11'")
    assert (found["torch"].state, found["torch"].found) == (MISSING, "torch 2.1.0 is too old")
    assert found["torch"].todo == "pip install 'torch>=2.11'"
    assert "Gloo" not in found
    broken = asked(monkeypatch, torch=None, error="torch cannot be imported: libc", todo="")["torch"]
    assert broken.todo.startswith("install it anew")


def test_what_torch_sees_of_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, state, words in (
        ({"cuda": "12.8", "cuda_devices": 2, "nccl": "2.27"}, OK, "12.8, torch sees 2 devices"),
        ({"cuda": "12.8", "cuda_devices": 1, "nccl": "2.27"}, OK, "nvidia-smi has 2: see CUDA_VISIBLE_DEVICES"),
        ({"cuda": "12.8"}, WARNING, "torch has CUDA 12.8, but sees none of them"),
        ({}, WARNING, "this build of torch has no CUDA"),
    ):
        found = asked(monkeypatch, CARDS, **answer)
        assert (found["CUDA"].state, words in found["CUDA"].found) == (state, True)
        assert ("NCCL" in found) == bool(answer.get("cuda_devices"))
    found = asked(monkeypatch, CARDS, cuda="12.8", cuda_devices=2, gloo="connect failed", sklearn=None)
    assert (found["Gloo"].state, found["NCCL"].state, found["scikit-learn"].state) == (MISSING, WARNING, WARNING)
    assert "connect failed" in found["Gloo"].found
    assert all(found[name].todo for name in ("Gloo", "NCCL", "scikit-learn"))


def test_a_self_test_is_a_line_for_every_run_and_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        {"name": "1-1, gpipe", "passed": True, "text": "16 losses equal", "seconds": 3.2},
        {"name": "1-1, 2bw, nccl", "passed": False, "text": "it hung", "seconds": 25.0},
    ]
    report = {"results": runs, "hardware": "2 GPUs", "transport": "gloo", "remembered": "/cache/selftest.json"}
    done = subprocess.CompletedProcess([], 0, f"noise\n{json.dumps(report)}\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = doctor.run_self_test()
    assert [(one.name, one.state) for one in found] == [
        ("1-1, gpipe", OK),
        ("1-1, 2bw, nccl", MISSING),
        ("self-test", OK),
    ]
    assert found[0].found == "16 losses equal (3 s)"
    assert found[-1].found == (
        "1 of 2 failed on 2 GPUs; messages travel by --transport gloo, remembered in /cache/selftest.json"
    )
    done.stdout, done.stderr = "", "Traceback\nImportError: no torch"
    (failed,) = doctor.run_self_test()
    assert (failed.state, failed.found) == (MISSING, "ImportError: no torch")


def test_ports_threads_folders_and_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        number = str(taken.getsockname()[1])
        found = doctor.check_port({"MASTER_PORT": number})
    assert (found.state, number in found.found) == (MISSING, True)
    threads, gone = doctor.check_threads({"OMP_NUM_THREADS": "4"}), tmp_path / "gone"
    assert "--threads 4" in threads.todo
    states = [doctor.check_port({}), doctor.check_threads({}), doctor.check_folder(tmp_path), doctor.check_python()]
    assert [one.state for one in states] == [OK] * 4
    states = [doctor.check_port({"MASTER_PORT": "http"}), doctor.check_folder(gone)]
    assert [one.state for one in states] == [MISSING] * 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30, 2**20))
    states = [threads, doctor.check_shared_memory(gone), doctor.check_folder(tmp_path), doctor.check_temporary_folder()]
    assert [one.state for one in [*states, doctor.check_shared_memory(tmp_path)]] == [WARNING] * 5
    monkeypatch.setattr(doctor, "OLDEST", (99, 0))
    assert doctor.check_python().state == MISSING


def test_the_exit_code_says_whether_anything_needed_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for state, code in ((OK, 0), (WARNING, 0), (MISSING, 2)):
        found = [DoctorFinding("torch", "training", state, "as found", "do this")]
        monkeypatch.setattr("pipeplan.cli.commands.doctor.examine_machine", lambda plan, found=found: found)
        done = run("doctor")
        assert (done.code, done.err) == (code, "")
        first, *rest = done.out.splitlines()
        assert first.split() == [state, "torch", "as", "found"]
        assert ("needed for training: do this" in rest[0]) == (state != OK)
        assert done.out.endswith("Missing: torch.\n" if code else "Nothing that is needed is missing.\n")
        assert json.loads(run("doctor", "--json").out) == [found[0].to_json()]


def test_a_plan_is_looked_at_as_its_first_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES", "WORKERS"):
        monkeypatch.delenv(name, raising=False)
    empty = doctor.check_plan_here(tmp_path)
    assert (empty.state, "pipeplan solve" in empty.todo) == (MISSING, True)
    plan = tmp_path / "plan"
    write_plan(solve(servers_of(1, 2), pipeplan.Settings()), plan)
    found = doctor.check_plan_here(plan)
    assert (found.state, found.found) == (OK, f"{plan} can run here")
    monkeypatch.setenv("NODE_RANK", "7")
    assert "NODE_RANK is '7'" in doctor.check_plan_here(plan).found
    (plan / "stages" / "stage-0.json").write_text("{")
    found = doctor.check_plan_here(plan)
    assert (found.state, "stage-0.json" in found.found, found.found[:5] == "error") == (MISSING, True, False)


@pytest.mark.slow
def test_on_this_machine_with_a_real_torch(tmp_path: Path) -> None:
    """Two processes talk over the loopback interface, and cannot where that is down."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MASTER_PORT", "OMP_NUM_THREADS")}
    command = [sys.executable, "-m", "pipeplan", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert done.returncode == 0, found
    assert found["torch"]["state"] == found["Gloo"]["state"] == OK
    assert list(tmp_path.iterdir()) == []
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and network namespaces for all users")
    # What the user exported for other runs makes no difference.
    environment |= {"GLOO_SOCKET_IFNAME": "nowhere0"}
    for prefix, works in (([], True), (alone, False)):
        command = [*prefix, sys.executable, "-m", "pipeplan_launch.capabilities"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert (json.loads(done.stdout)["gloo"] == "") is works


def test_writes_both_files_says_what_is_next_and_never_overwrites_unasked(run: Run, tmp_path: Path) -> None:
    done = run("init", "--workers", "3")
    assert (done.code, done.err) == (0, "written: job.py\nwritten: cluster.toml\n")
    assert done.out.splitlines()[1:] == [
        "  pipeplan profile job.py:build",
        "  pipeplan solve profile.json --cluster cluster.toml",
        "  ./plan/launch.sh --epochs 5",
    ]
    compile((tmp_path / "job.py").read_text(), "job.py", "exec")
    assert read_cluster(tmp_path / "cluster.toml").workers == 3
    (tmp_path / "job.py").unlink()
    (tmp_path / "cluster.toml").write_text("mine")
    assert "cluster.toml exists: give another folder with -o, or --force" in refused(run, "init")
    assert run("init", "--force", "-q").err == ""
    assert read_cluster(tmp_path / "cluster.toml").name == "mine"


def test_another_folder_is_quoted_in_what_is_next(run: Run, tmp_path: Path) -> None:
    answer = json.loads(run("init", "-o", "my lab/a", "--json").out)
    assert answer["files"] == ["my lab/a/job.py", "my lab/a/cluster.toml"]
    words = [shlex.split(step) for step in answer["next"]]
    assert words[0] == ["pipeplan", "profile", "my lab/a/job.py:build", "-o", "my lab/a/profile.json"]
    assert words[1][-4:] == ["--cluster", "my lab/a/cluster.toml", "-o", "my lab/a/plan"]
    assert words[2][0] == "my lab/a/plan/launch.sh"
    for folder, script in (("lab", "./lab/plan/launch.sh"), ("/lab", "/lab/plan/launch.sh")):
        assert init.next_commands(Path(folder), "cpu")[2].split()[0] == script
        assert init.next_commands(Path(folder), "cuda")[0].split()[3:5] == ["--device", "cuda"]
    for mistake in (("a", "-o", "b"), ("my lab/a/job.py",)):
        refused(run, "init", *mistake)


def test_the_cluster_file_is_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its GPUs differ: two unknown cards, and two whose peaks are known from bundled device files."""

    def read() -> Cluster:
        (tmp_path / "box.toml").write_text(init.cluster_text(local_cluster(None)))
        return read_cluster(tmp_path / "box.toml")

    found, here = read(), local_cluster(None)
    assert (found.levels, found.device.cores) == (here.levels, here.device.cores)
    assert (found.device.name, found.device.kind) == (here.device.name, here.device.kind)
    assert 0 <= here.device.memory_bytes - found.device.memory_bytes < 2**30 / 10
    for names, speeds in ((["RTX 4090", "RTX 4060 Ti"], (1.0, 1.0)), (["V100", "A100"], (0.8, 1.0))):
        sizes = (24564, 16380)
        gpus = [local.Hardware(name, "cuda", size << 20, 1) for name, size in zip(names, sizes, strict=True)]
        monkeypatch.setattr(local, "local_gpus", lambda gpus=gpus: gpus)
        found = read()
        assert (found.servers, [device.name for device in found.devices]) == (1, names)
        assert [device.memory_bytes / 2**30 for device in found.devices] == pytest.approx([23.9, 15.9], abs=0.01)
        assert [device.speed for device in found.devices] == pytest.approx(speeds, abs=0.1)
        assert local_cluster(1).uniform


def test_more_servers_are_there_when_their_marks_are_taken_off(tmp_path: Path) -> None:
    gpus = Cluster("local", Device("A100", "cuda", 40 * 2**30), (Level("server", 4, 12e9),))
    head, mark, servers = init.cluster_text(gpus).partition("\n# [[level]]")
    uncommented = "\n".join(line.removeprefix("# ") for line in (mark + servers).splitlines())
    (tmp_path / "two.toml").write_text(head + uncommented)
    found = read_cluster(tmp_path / "two.toml")
    assert (found.servers, found.workers, found.device.memory_bytes) == (2, 8, 40 * 2**30)


@pytest.mark.slow
def test_the_job_learns(tmp_path: Path) -> None:
    """As one process would train it, in the words that the job itself uses."""
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    from pipeplan_launch import load_job

    init.write_starter_files(tmp_path, init.starter_files())
    job = load_job(f"{tmp_path / 'job.py'}:build", seed=0)
    optimizer = job.optimizer(job.model.parameters())
    for inputs, targets in DataLoader(job.datasets.train, job.minibatch, shuffle=True):
        optimizer.zero_grad()
        job.loss(job.model(inputs), targets).backward()
        optimizer.step()
    inputs, targets = job.datasets.test.tensors
    assert (job.model(inputs).argmax(dim=1) == targets).float().mean() > 0.9


def test_the_next_step_of_a_measurement_names_the_cluster_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = pipeplan.read_profile("mnist-v100")
    monkeypatch.chdir(tmp_path)
    assert _next(profile, Path("lab/profile.json")) == "pipeplan solve lab/profile.json --cluster YOURS.toml"
    init.write_starter_files(tmp_path / "lab", init.starter_files())
    assert _next(profile, Path("lab/profile.json")) == "pipeplan solve lab/profile.json --cluster lab/cluster.toml"
