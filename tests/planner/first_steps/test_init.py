"""What a new user begins with."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import Run, refused

import pipeplan
from pipeplan.cli.profile.measure import _next
from pipeplan.cluster_data import local
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.cluster_toml import read_cluster
from pipeplan.cluster_data.local import local_cluster
from pipeplan.first_steps import init


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
def test_the_three_commands_work(tmp_path: Path) -> None:
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def typed(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300, check=False
        )

    steps = json.loads(typed("pipeplan init 'a lab' --workers 3 --json").stdout)["next"]
    assert len(steps) == 3
    for step, more in zip(steps, (" --repeats 3", "", " --max-minibatches 6 --log-every 2"), strict=True):
        done = typed(step + more)
        assert done.returncode == 0, done.stderr
    assert "epoch 5/5" in done.stderr
    assert list((tmp_path / "a lab" / "plan" / "runs").glob("*/summary.json"))


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
