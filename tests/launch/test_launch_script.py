"""launch.sh, rendered and run: with hostile names, and up to a trained model in real worker processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch_scripts import JOB, render
from toy_workers import stage_contents, write_plan

HOSTILE = "x'y\"z $(touch pwned) `touch pwned`\nrm -rf pwned; #"


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "OMP_NUM_THREADS")}
    return subprocess.run(
        [script, *arguments], capture_output=True, text=True, check=False, cwd="/", env=clean | environment, timeout=120
    )


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("title", ["a plan", HOSTILE])
def test_is_clean_for_shellcheck(tmp_path: Path, servers: int, title: str) -> None:
    script = render(tmp_path, servers=servers, title=title, python=f"/no/{title}", device=title)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_hostile_names_run_nothing(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    script = render(folder, title=HOSTILE, python=f"/no/{HOSTILE}", device=HOSTILE)
    done = run(script, HOSTILE, PYTHON=sys.executable)
    assert done.returncode == 2
    assert not list(tmp_path.rglob("pwned"))
    assert not Path("/pwned").exists()


def test_the_missing_prerequisite_is_named(tmp_path: Path) -> None:
    script = render(tmp_path)
    done = run(script)
    assert done.returncode == 2
    assert "is not a plan folder" in done.stderr
    done = run(script, PYTHON="/bin/false")
    assert done.returncode == 2
    assert "set PYTHON to an interpreter" in done.stderr
    contents = [content | {"servers": 2} for content in stage_contents([1, 1])]
    done = run(render(write_plan(tmp_path, contents), servers=2))
    assert done.returncode == 2
    assert "the plan spans 2 servers" in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_is_printed_once(tmp_path: Path) -> None:
    done = run(render(tmp_path), "--help")
    assert done.returncode == 0
    assert done.stdout.count("usage: launch.sh") == 1


def test_trains_a_users_model_in_worker_processes(tmp_path: Path) -> None:
    """torchrun, tracing, splitting, training, evaluation and the checkpoint, without anything of the test's own."""
    job = tmp_path / "my job $x.py"
    job.write_text(JOB)
    contents = stage_contents([1, 1], minibatch=4)
    layers = [["0", "1"], ["2", "loss"]]
    for content in contents:
        content["model"] = {"ref": f"{job}:job", "graph_hash": None}
        content["layers"] = layers[content["stage"]]
    script = render(write_plan(tmp_path / "plan", contents))
    done = run(script, "--epochs", "2", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["epochs"]) == 2
    assert "predicted -> measured" in done.stdout
