"""The plan folder: its contents, that it is complete or absent, and that no name in it runs as a command."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from small_plans import NASTY, outcome, servers_of

from pipeplan.cluster_data.cluster import Level
from pipeplan.errors import InputError
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.rendering import plan_folder
from pipeplan_launch.plan.stage_files import load_plan


def test_a_plan_folder_holds_what_the_executor_needs(tmp_path: Path) -> None:
    solved = outcome()
    plan_folder.write_plan(solved, tmp_path / "plan")
    assert sorted(path.name for path in (tmp_path / "plan").iterdir()) == ["launch.sh", "plan.json", "stages"]
    stages = [json.loads(path.read_text()) for path in sorted((tmp_path / "plan" / "stages").iterdir())]
    assert [stage["stage"] for stage in stages] == list(range(len(solved.plan.stages)))
    assert {name for stage in stages for name in stage["layers"]} == {"a", "b"}
    assert all(stage["pipeline"] == stages[0]["pipeline"] for stage in stages)
    assert len({stage["plan"] for stage in stages}) == 1
    document = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert document["prediction"]["minibatch_s"] == solved.evaluation.step_time_s
    assert document["verdict"]["proven"] is True
    assert (tmp_path / "plan" / "launch.sh").stat().st_mode & 0o111
    assert [path.name for path in tmp_path.iterdir()] == ["plan"], "no scratch folder is left behind"
    assert len(load_plan(tmp_path / "plan").layers) == len(solved.plan.stages), "the executor reads it"


def test_a_second_plan_needs_force_and_keeps_the_runs(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    plan_folder.write_plan(outcome(), folder)
    (folder / "runs").mkdir()
    (folder / "runs" / "metrics.jsonl").write_text("{}")
    (folder / "stages" / "stage-7.json").write_text("stale")
    with pytest.raises(InputError, match="already holds a plan"):
        plan_folder.write_plan(outcome(), folder)
    plan_folder.write_plan(outcome(model="other"), folder, force=True)
    assert json.loads((folder / "plan.json").read_text())["profile"]["model"] == "other"
    assert (folder / "runs" / "metrics.jsonl").exists()
    assert not (folder / "stages" / "stage-7.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


def test_force_replaces_the_plan_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plan"
    plan_folder.write_plan(outcome(), folder)
    (folder / "mine").mkdir()
    (folder / "mine" / "checkpoint").write_text("weights")
    monkeypatch.chdir(folder)
    plan_folder.write_plan(outcome(model="here"), Path("."), force=True)
    (tmp_path / "link").symlink_to(folder)
    plan_folder.write_plan(outcome(model="linked"), tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert json.loads((folder / "plan.json").read_text())["profile"]["model"] == "linked"
    assert (folder / "mine" / "checkpoint").read_text() == "weights"
    assert sorted(path.name for path in folder.iterdir()) == ["launch.sh", "mine", "plan.json", "stages"]


def test_a_failure_keeps_the_older_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plan"
    plan_folder.write_plan(outcome(), folder)
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan_folder, "launch_script", full)
    with pytest.raises(InputError, match="No space left on device"):
        plan_folder.write_plan(outcome(), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["plan"], "a failure leaves nothing behind"
    with pytest.raises(InputError, match="No space left on device"):
        plan_folder.write_plan(outcome(model="other"), folder, force=True)
    assert {path: path.read_text() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not empty and holds no plan"):
        plan_folder.write_plan(outcome(), tmp_path, force=True)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "plan"):
        with pytest.raises(InputError, match="is not a folder"):
            plan_folder.write_plan(outcome(), place, force=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def _stub(folder: Path, program: str) -> dict[str, str]:
    """An environment whose Python is this program of the shell."""
    stub = folder / "python"
    stub.write_text(f"#!/bin/sh\n{program}\n")
    stub.chmod(0o755)
    return {"PATH": "/usr/bin:/bin", "PYTHON": str(stub)}


@pytest.mark.parametrize("servers", [1, 2])
def test_no_name_can_run_anything(tmp_path: Path, servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = outcome(model=NASTY, layer=NASTY, cluster=NASTY)
    if servers > 1:
        levels = (Level("server", 3, 100.0), Level("cluster", servers, 10.0))
        solved = solve(Problem(solved.problem.profile, replace(solved.problem.cluster, levels=levels)), Settings())
    folder = tmp_path / "plan $(touch pwned) 'x' \"y\""
    monkeypatch.setattr("sys.executable", f"/no/such/{NASTY}")
    plan_folder.write_plan(solved, folder)
    script = (folder / "launch.sh").read_text()
    assert "\x1b" not in "".join(line for line in script.splitlines() if line.startswith("#"))
    subprocess.run(["bash", "-n", str(folder / "launch.sh")], check=True)
    # A stand-in for Python that prints its arguments, one a line in brackets.
    environment = _stub(tmp_path, 'for word in "$@"; do printf "[%s]\\n" "$word"; done')
    environment |= {"NODE_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    command = [str(folder / "launch.sh"), "--run-dir", "my $(touch pwned) run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert f"[{folder}]" in done.stdout
    assert "[my $(touch pwned) run]" in done.stdout
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("servers", [1, 2])
def test_a_plan_that_cannot_run_here_ends_before_any_worker(tmp_path: Path, servers: int) -> None:
    plan_folder.write_plan(solve(servers_of(3, servers, "cuda"), Settings()), tmp_path / "plan")
    script = (tmp_path / "plan" / "launch.sh").read_text()
    assert "\nset -euo pipefail\n" in script
    assert script.endswith('"$@"\n')
    # A stand-in for Python whose preflight fails.
    environment = _stub(tmp_path, 'case "$*" in *preflight*) exit 2 ;; *torchrun*) echo started ;; esac')
    command = [str(tmp_path / "plan" / "launch.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_script_passes_shellcheck(tmp_path: Path) -> None:
    plan_folder.write_plan(outcome(model=NASTY), tmp_path / "plan")
    subprocess.run(["shellcheck", str(tmp_path / "plan" / "launch.sh")], check=True)
