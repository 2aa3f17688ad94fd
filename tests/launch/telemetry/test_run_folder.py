"""Who may use a run folder: one launch at a time, and a new run where there was none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.telemetry import recorder, run_folder

HOLD = "import sys; from pathlib import Path; from pipeplan_launch.telemetry import run_folder\n"
HOLD += "run_folder.lock_run(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_a_run_belongs_to_one_launch_until_that_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LaunchError, match="in use by another launch"):
            run_folder.lock_run(tmp_path, patience_s=0.0)
        other.kill()
    run_folder.lock_run(tmp_path)


def test_a_start_that_failed_leaves_the_folder_for_the_next(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_folder.new_run(tmp_path, run)
    assert run_folder.claim_error(run, "the job is wrong")
    assert run_folder.new_run(tmp_path, run) == run
    assert not run_folder.has_failed(run)
    (run / "metrics" / "rank-0.jsonl").write_text("{}\n")
    with pytest.raises(LaunchError, match="ended before its first checkpoint: choose another --run-dir"):
        run_folder.new_run(tmp_path, run)
    (run / "checkpoints" / "epoch-0001").mkdir(parents=True)
    (run / "checkpoints" / "epoch-0001" / "manifest.json").write_text("{}")
    with pytest.raises(LaunchError, match="already holds a run: add --resume"):
        run_folder.new_run(tmp_path, run)


def test_a_job_that_ends_the_process_is_named() -> None:
    with pytest.raises(LaunchError, match=r"the job's loss failed: SystemExit: 5"), user_code_errors("the job's loss"):
        raise SystemExit(5)


def test_metrics_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files at most, and the same lines go when the run goes on from an earlier place."""
    monkeypatch.setattr(recorder, "MOST_METRICS_BYTES", 10_000)
    (tmp_path / "metrics").mkdir()
    path = tmp_path / "metrics" / "rank-0.jsonl"
    writing = recorder.Recorder(path, 0, 0, 0, 1, 0)
    for minibatch in range(200):
        writing.begin(0, minibatch)
        writing.end(minibatch)
    writing.close()
    older = path.with_name("rank-0.jsonl.old")
    assert sorted(path.parent.iterdir()) == [path, older]
    assert path.stat().st_size < 20_000
    assert older.stat().st_size < 20_000
    found = [json.loads(line)["minibatch"] for one in (older, path) for line in one.read_text().splitlines()]
    assert found == list(range(found[0], 200))
    run_folder.reopen_run(tmp_path, 0, found[0] + 2)
    found = [json.loads(line)["minibatch"] for one in (older, path) for line in one.read_text().splitlines()]
    assert found == [found[0], found[0] + 1]
