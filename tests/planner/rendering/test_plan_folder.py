"""The plan folder: complete or absent, no name in it runs as a command, and it says what its updates are."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from small_plans import NASTY, outcome, servers_of, shaped

import pipeplan
from pipeplan.cluster_data.cluster import Level
from pipeplan.errors import InputError
from pipeplan.plan.updates import Updates
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.rendering import plan_folder
from pipeplan.rendering.plan_json import plan_document
from pipeplan_launch.plan.run_options import updates_sentence
from pipeplan_launch.plan.stage_files import load_plan


def test_force_replaces_the_plan_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plan"
    plan_folder.write_plan(outcome(), folder)
    assert (folder / "launch.sh").stat().st_mode & 0o111
    assert len(load_plan(folder).layers) == len(outcome().plan.stages), "the executor reads it"
    for name in ("runs/metrics.jsonl", "mine/checkpoint"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("kept")
    (folder / "stages" / "stage-7.json").write_text("stale")
    with pytest.raises(InputError, match="already holds a plan"):
        plan_folder.write_plan(outcome(), folder)
    monkeypatch.chdir(folder)
    (tmp_path / "link").symlink_to(folder)
    for place, model in ((Path("."), "here"), (tmp_path / "link", "linked")):
        plan_folder.write_plan(outcome(model=model), place, force=True)
        assert json.loads((folder / "plan.json").read_text())["profile"]["model"] == model
    assert (tmp_path / "link").is_symlink()
    assert [(folder / name).read_text() for name in ("runs/metrics.jsonl", "mine/checkpoint")] == ["kept"] * 2
    assert not (folder / "stages" / "stage-7.json").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["launch.sh", "mine", "plan.json", "runs", "stages"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "plan"]


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


def test_no_name_can_run_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = outcome(model=NASTY, layer=NASTY, cluster=NASTY)
    levels = (Level("server", 3, 100.0), Level("cluster", 2, 10.0))
    two = solve(Problem(solved.problem.profile, replace(solved.problem.cluster, levels=levels)), Settings())
    monkeypatch.setattr("sys.executable", f"/no/such/{NASTY}")
    # A stand-in for Python that prints its arguments, one a line in brackets.
    environment = _stub(tmp_path, 'for word in "$@"; do printf "[%s]\\n" "$word"; done')
    environment |= {"NODE_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for servers, made in enumerate((solved, two), 1):
        folder = tmp_path / f"plan {servers} $(touch pwned) 'x' \"y\""
        plan_folder.write_plan(made, folder)
        command = [str(folder / "launch.sh"), "--run-dir", "my $(touch pwned) run"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert f"[{folder}]" in done.stdout
        assert "[my $(touch pwned) run]" in done.stdout
        assert not list(tmp_path.rglob("pwned"))


def test_a_plan_that_cannot_run_here_ends_before_any_worker(tmp_path: Path) -> None:
    # A stand-in for Python whose preflight fails.
    environment = _stub(tmp_path, 'case "$*" in *preflight*) exit 2 ;; *torchrun*) echo started ;; esac')
    for servers in (1, 2):
        plan_folder.write_plan(solve(servers_of(3, servers, "cuda"), Settings()), tmp_path / "plan", force=True)
        script = tmp_path / "plan" / "launch.sh"
        assert "\nset -euo pipefail\n" in script.read_text()
        assert script.read_text().endswith('"$@"\n')
        done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


SETTINGS = Settings(solver="dp", certify=False, simulate=False)


def test_staleness_and_samples_of_every_schedule() -> None:
    for replicas, depths, schedule, accumulate, stale_by, samples, text in (
        (
            (1, 1, 1),
            (3, 2, 1),
            "1f1b-stashing",
            None,
            (2, 1, 0),
            (10, 10, 10),
            "are up to 2, 1, 0 updates old by stage",
        ),
        # A stage with replicas awaits its all-reduce one update later.
        ((3, 1), (2, 1), "1f1b-stashing", None, (2, 0), (30, 10), "an update averages over 30, 10 samples by stage."),
        ((4,), (1,), "1f1b-stashing", None, (0,), (40,), "Synchronous (1f1b-stashing): no gradient is stale; an upd"),
        ((1, 1, 1), (3, 2, 1), "vertical-sync", None, (2, 2, 2), (10, 10, 10), "are up to 2 updates old; an update"),
        ((2, 1), (2, 1), "2bw", 8, (1, 1), (80, 80), "are up to 1 update old; an update averages over 80 samples."),
        ((2, 1), (4, 8), "gpipe", 8, (0, 0), (80, 80), ""),
        ((1, 1), (2, 1), "1f1b-flush", 8, (0, 0), (80, 80), ""),
    ):
        found = Updates.of(shaped(replicas, depths, schedule, accumulate), 10)
        assert (found.stale_by, found.samples) == (stale_by, samples), (replicas, schedule)
        assert found.synchronous is (sum(stale_by) == 0)
        assert text in found.text
    many = Updates.of(shaped((1,) * 12, tuple(range(12, 0, -1)), "1f1b-stashing"), 10)
    assert "up to 11, 10, 9, …, 0 updates old by stage;" in many.text


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "vertical-sync"}, {"schedule": "2bw", "accumulate": 8}, {"max_workers": 1}]
)
def test_table_files_and_executor_say_the_same(options: dict[str, object], tmp_path: Path) -> None:
    profile, cluster = pipeplan.read_profile("mnist-v100"), pipeplan.cluster("C")
    outcome: Outcome = pipeplan.solve(profile, cluster, settings=SETTINGS, **options)  # type: ignore[arg-type]
    folder = pipeplan.render(outcome, tmp_path / "plan")
    told = Updates.of(outcome.plan, profile.minibatch)
    assert updates_sentence(load_plan(folder)) == told.text
    assert f"# {told.text}\n" in (folder / "launch.sh").read_text(encoding="utf-8")
    written = plan_document(outcome)["updates"]
    assert {name: value for name, value in written.items() if name != "learning"} == told.to_json()
    assert ("learning" in written) is not told.synchronous
