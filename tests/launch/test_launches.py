"""launch.sh, rendered and run: hostile names, kills and requests, a model trained by real workers, and no open door."""

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
from typing import Any

import pytest
from extents import slow_but_for
from launching import JOB, SLOW_JOB, Launch, curve, left_nothing, render, script_of
from listening import Observed, observe, why_impossible
from saved import latest
from toy_workers import stage_contents, write_plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
LOOPBACK = "0100007F"
"""127.0.0.1, as /proc/net/tcp writes it."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """launch.sh of a plan 1-1 for a small model whose samples take their time."""
    return script_of(tmp_path, SLOW_JOB)


def begin(script: Path, *options: str, **environment: str) -> Launch:
    """A launch that goes on until it is stopped."""
    given = ("--epochs", "100000", "--log-every", "0", *options)
    return Launch(script, script.parents[1] / "run", *given, **environment)


def test_goes_on_after_a_kill_and_stops_when_its_terminal_closes(script: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "temporary").mkdir()
    # Under nohup these tests, and a run that inherits it, would ignore the signal.
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with begin(script, "--checkpoint-minibatches", "7", TMPDIR=str(tmp_path / "temporary")) as launch:
        signal.signal(signal.SIGHUP, inherited)
        launch.until(lambda: bool(list(run.glob("checkpoints/*/manifest.json"))), "checkpoint")
        assert set(launch.listening()) == {LOOPBACK}
        launch.kill(rank=1)
        launch.trains()
        assert set(launch.listening()) == {LOOPBACK}, "after a restart as well"
        launch.process.send_signal(signal.SIGHUP)
        assert launch.wait() == 0, launch.lines
        assert left_nothing(launch)
    said = [line for line in launch.lines if not line.startswith(("note", "plan", "epoch", "Asynchronous"))]
    assert len(said) == 2
    assert said[0].startswith(f"worker 1 was lost; restart 1 of 3: resumed from {run}/checkpoints/")
    assert said[1].startswith("stopped after ")
    assert {path.name for path in (tmp_path / "temporary").iterdir()} <= {f"torchinductor_{getpass.getuser()}"}
    last = latest(run)
    losses = curve(run)  # every minibatch up to the checkpoint of the stop, once, and no other
    assert max(losses) == (last.position.epoch, last.position.minibatch - 1)
    assert len(losses) == 24 * last.position.epoch + last.position.minibatch


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
def test_a_worker_that_is_busy_when_another_is_lost_is_not_taken_for_lost(script: Path, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SLOW_JOB.replace("time.sleep(0.002)", "time.sleep(0.4)"))
    with begin(script) as launch:
        launch.until(lambda: launch.said("plan 1-1"), "start")
        time.sleep(1)
        launch.kill(rank=1)
        launch.until(lambda: launch.said("restart 1 of 3"), "restart")
    assert launch.said("worker 1 was lost; restart 1 of 3: training begins anew")


@pytest.mark.parametrize("delay_s", slow_but_for([0.0], [0.0, 0.02, 0.1, 0.3, 1.0]))
def test_no_orphan_outlives_a_launcher_that_is_killed_at_the_start(script: Path, delay_s: float) -> None:
    """Also not a worker that has not yet asked the kernel to die with it."""
    with begin(script) as launch:
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


def test_is_clean_for_shellcheck(tmp_path: Path) -> None:
    variables: list[dict[str, Any]] = [{"servers": 2, "server_sizes": (2, 1), "uneven": True}]
    for title in ("a plan", HOSTILE):
        named = {"title": title, "python": f"/no/{title}", "device": title}
        variables += [named | {"servers": servers} for servers in (1, 2)]
    for one in variables:
        script = render(tmp_path, **one)
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
    assert run(script, "--help").stdout.count("usage: launch.sh") == 1
    contents = [content | {"servers": 2} for content in stage_contents([1, 1])]
    on_two = render(write_plan(tmp_path / "two", contents), servers=2)
    for chosen, says in ((script, "is not a plan folder"), (on_two, "the plan spans 2 servers")):
        done = run(chosen)
        assert done.returncode == 2
        assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_trains_a_users_model_in_worker_processes(tmp_path: Path) -> None:
    """torchrun, tracing, splitting, training, evaluation and the checkpoint, without anything of the test's own."""
    folder = tmp_path / "my job $x"
    folder.mkdir()
    done = run(script_of(folder, JOB), "--epochs", "2", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["epochs"]) == 2
    assert "predicted -> measured" in done.stdout
    assert "not self-checked" not in done.stderr


# Commands of one machine listen on the loopback interface only, whatever the environment says.

in_a_namespace = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")
PIPEPLAN = [sys.executable, "-m", "pipeplan"]
FAILS_ONCE = """
    import os, signal
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def assert_closed(observed: Observed, *, listens: bool = True) -> None:
    """It did what it should, and nobody else could have reached it."""
    assert observed.status == 0, observed.output
    assert observed.doors == []
    assert ("127.0.0.1" in observed.listening) == listens


def launch(script: Path, *options: str) -> Observed:
    folder = script.parents[1]
    return observe([str(script), "--run-dir", str(folder / "run"), "--log-every", "0", *options], folder)


@in_a_namespace
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "nccl", "inference", "restart"])
def test_no_launch_opens_a_door(tmp_path: Path, transport: str) -> None:
    if transport == "inference":
        assert_closed(launch(script_of(tmp_path, JOB, mode="inference")))
        return
    if transport == "restart":
        job = JOB.replace("def job():", f"def job():{FAILS_ONCE}")
        observed = launch(script_of(tmp_path, job), "--epochs", "1", "--restarts", "1")
        assert_closed(observed)
        assert "restart 1 of 1" in observed.output
        return
    job = JOB.replace("Data(data, data)", "Data(data, data, processes=2)")
    for replicas in ([1], [2], [1, 1, 1]):
        folder = tmp_path / "-".join(map(str, replicas))
        folder.mkdir()
        assert_closed(launch(script_of(folder, job, replicas), "--epochs", "2", "--transport", transport))


@in_a_namespace
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_workers_that_are_started_by_hand_open_no_door(tmp_path: Path, world: int) -> None:
    folder = script_of(tmp_path, JOB, [1] * world).parent
    worker = f"{sys.executable} -m pipeplan_launch {folder} --epochs 1 --run-dir run"
    started = " & ".join(f"RANK={rank} LOCAL_RANK={rank} {worker}" for rank in range(world))
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert_closed(observe(["bash", "-c", f"{started}; wait"], tmp_path, **sizes))


@in_a_namespace
@pytest.mark.slow
def test_no_command_of_the_planner_opens_a_door(tmp_path: Path) -> None:
    """But for those that measure with workers, they do not listen at all."""
    profiled = [*PIPEPLAN, "profile", "mnist", "--repeats", "2", "--halvings", "0"]
    solved = [*PIPEPLAN, "solve", "profile.json", "--cluster", "local", "--workers", "2", "--force"]
    links = [*PIPEPLAN, "profile", "--links", "--workers", "2", "--device", "cpu", "--budget", "0.5", "-o", "made.toml"]
    for command in (profiled, solved, [*PIPEPLAN, "export", "ssh", "plan"]):
        assert_closed(observe(command, tmp_path), listens=False)
    assert_closed(observe([*PIPEPLAN, "doctor", "plan"], tmp_path))
    assert_closed(observe(profiled, tmp_path, PIPEPLAN_EXECUTOR_COSTS="on", XDG_CACHE_HOME=str(tmp_path)))
    assert_closed(observe(links, tmp_path))
    (tmp_path / "made.toml").unlink()
    assert_closed(observe([*links, "--servers", "1"], tmp_path, NODE_RANK="0"))
    observed = observe([*PIPEPLAN, "doctor", "--selftest"], tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert "messages, host" in observed.output
    assert "MISSING" not in observed.output, observed.output
    assert_closed(observed)
