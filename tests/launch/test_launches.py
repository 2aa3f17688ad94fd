"""launch.sh, rendered and run: hostile names, several launches of a run, and a model trained by real workers."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from extents import slow_but_for
from launch_scripts import JOB, SLOW_JOB, render
from launching import Launch, curve, left_nothing
from toy_workers import stage_contents, write_plan

from pipeplan_launch.checkpoint.checkpoint import latest_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
LOOPBACK = "0100007F"
"""127.0.0.1, as /proc/net/tcp writes it."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """launch.sh of a plan 1-1 for a small model whose samples take their time."""
    (tmp_path / "job.py").write_text(SLOW_JOB)
    contents = stage_contents([1, 1], minibatch=4)
    for content in contents:
        content["model"] = {"ref": f"{tmp_path / 'job.py'}:job", "graph_hash": None}
        content["layers"] = [["0", "1"], ["2", "loss"]][content["stage"]]
    return render(write_plan(tmp_path / "plan", contents))


def test_goes_on_after_a_kill_and_stops_when_asked(script: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--epochs", "100000", "--checkpoint-minibatches", "7", "--log-every", "0")
    (tmp_path / "temporary").mkdir()
    with Launch(script, run, *options, TMPDIR=str(tmp_path / "temporary")) as launch:
        launch.until(lambda: bool(list(run.glob("checkpoints/*/manifest.json"))), "checkpoint")
        assert set(launch.listening()) == {LOOPBACK}
        launch.kill(rank=1)
        launch.trains()
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == 0, launch.lines
        assert left_nothing(launch)
    said = [line for line in launch.lines if not line.startswith(("note", "plan", "epoch", "Asynchronous"))]
    assert len(said) == 2
    assert said[0].startswith(f"worker 1 was lost; restart 1 of 3: resumed from {run}/checkpoints/")
    assert said[1].startswith("stopped after ")
    assert {path.name for path in (tmp_path / "temporary").iterdir()} <= {f"torchinductor_{getpass.getuser()}"}
    last = latest_checkpoint(run)
    assert last is not None
    losses = curve(run)  # every minibatch up to the checkpoint of the stop, once, and no other
    assert max(losses) == (last.position.epoch, last.position.minibatch - 1)
    assert len(losses) == 24 * last.position.epoch + last.position.minibatch


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(script: Path, tmp_path: Path) -> None:
    with Launch(script, tmp_path / "run", "--epochs", "100000", "--log-every", "0") as launch:
        launch.trains()
        assert len(launch.workers()) == 2
        launch.process.kill()
        launch.wait()
        assert left_nothing(launch)


@pytest.mark.slow
def test_a_request_before_training_ends_at_once(script: Path, tmp_path: Path) -> None:
    with Launch(script, tmp_path / "run") as launch:
        launch.until(lambda: len(launch.workers()) == 2, "workers")
        launch.process.send_signal(signal.SIGINT)
        assert launch.wait() == 130
        assert left_nothing(launch)
    assert launch.lines[-1] == "stopped: --resume continues from the last checkpoint, if there is one"
    assert [line for line in launch.lines if not line.startswith("note")] == launch.lines[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_goes_on_after_a_worker_was_frozen(script: Path, tmp_path: Path, rank: int) -> None:
    with Launch(script, tmp_path / "run", "--epochs", "100000", "--log-every", "0", "--timeout", "8") as launch:
        launch.trains()
        launch.kill(rank, signal.SIGSTOP)
        launch.until(lambda: launch.said("restart 1 of 3"), "restart")
        launch.trains()
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == 0, launch.lines
        assert left_nothing(launch)
    assert launch.said(f"worker {rank} was lost")


@pytest.mark.slow
def test_no_more_restarts_than_asked_for(script: Path, tmp_path: Path) -> None:
    with Launch(script, tmp_path / "run", "--epochs", "100000", "--log-every", "0", "--restarts", "1") as launch:
        for _ in range(2):
            launch.trains()
            launch.kill(rank=0)
        assert launch.wait() == 1
        assert left_nothing(launch)
    assert launch.lines[-1] == "error: worker 0 was ended by SIGKILL (out of memory is the usual reason for SIGKILL)"


@pytest.mark.slow
def test_a_worker_that_is_busy_when_another_is_lost_is_not_taken_for_lost(script: Path, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SLOW_JOB.replace("time.sleep(0.002)", "time.sleep(0.4)"))
    with Launch(script, tmp_path / "run", "--log-every", "0") as launch:
        launch.until(lambda: launch.said("plan 1-1"), "start")
        time.sleep(1)
        launch.kill(rank=1)
        launch.until(lambda: launch.said("restart 1 of 3"), "restart")
    assert launch.said("worker 1 was lost; restart 1 of 3: training begins anew")


def test_a_terminal_that_closes_leaves_a_checkpoint(script: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Under nohup these tests, and a run that inherits it, would ignore the signal.
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Launch(script, run, "--epochs", "100000", "--log-every", "0") as launch:
        signal.signal(signal.SIGHUP, inherited)
        launch.trains()
        launch.process.send_signal(signal.SIGHUP)
        assert launch.wait() == 0, launch.lines
        assert left_nothing(launch)
    assert launch.lines[-1].startswith("stopped after ")
    assert latest_checkpoint(run) is not None


@pytest.mark.parametrize("delay_s", slow_but_for([0.0], [0.0, 0.02, 0.1, 0.3, 1.0]))
def test_no_orphan_outlives_a_launcher_that_is_killed_at_the_start(
    script: Path, tmp_path: Path, delay_s: float
) -> None:
    """Also not a worker that has not yet asked the kernel to die with it."""
    with Launch(script, tmp_path / "run", "--epochs", "100000", "--log-every", "0") as launch:
        launch.until(lambda: bool(launch.started()), "first worker")
        time.sleep(delay_s)
        launch.process.kill()
        launch.wait()
        deadline = time.monotonic() + 20
        while launch.started() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert launch.started() == []


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
