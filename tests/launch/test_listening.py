"""Commands of one machine listen on the loopback interface only, whatever the environment says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from launch_scripts import JOB, render
from listening import Observed, observe, why_impossible
from toy_workers import stage_contents, write_plan

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at sockets as Linux shows them"),
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]
PIPEPLAN = [sys.executable, "-m", "pipeplan"]
FAILS_ONCE = """
    import os, signal
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""
LAYERS = {1: [["0", "1", "2", "loss"]], 2: [["0", "1"], ["2", "loss"]], 3: [["0"], ["1"], ["2", "loss"]]}


def plan(folder: Path, replicas: list[int], job: str = JOB, **changed: Any) -> Path:
    """A launch.sh that trains, or infers, as many stages as there are numbers."""
    (folder / "job.py").write_text(job)
    contents = stage_contents(replicas, minibatch=4, mode=changed.get("mode", "training"))
    for content, layers in zip(contents, LAYERS[len(replicas)], strict=True):
        content["model"] = {"ref": f"{folder / 'job.py'}:job", "graph_hash": None}
        content["layers"] = layers
        content |= changed
    return render(write_plan(folder / "plan", contents), workers_per_server=sum(replicas))


def assert_closed(observed: Observed, *, listens: bool = True) -> None:
    """It did what it should, and nobody else could have reached it."""
    assert observed.status == 0, observed.output
    assert observed.doors == []
    assert ("127.0.0.1" in observed.listening) == listens


def launch(script: Path, *options: str) -> Observed:
    folder = script.parents[1]
    return observe([str(script), "--run-dir", str(folder / "run"), "--log-every", "0", *options], folder)


def test_a_door_is_seen(tmp_path: Path) -> None:
    """Also one that is open for a moment, and one of a program that is not Python's."""
    code = "import socket; socket.create_server(('', 0)).close(); socket.create_server(('::1', 0), family=10).close()"
    assert observe([sys.executable, "-c", code], tmp_path).listening == ["0.0.0.0", "::1"]
    code = "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); time.sleep(0.2)"
    code = f"import time; from torch.distributed import TCPStore; {code}"
    assert observe([sys.executable, "-c", code], tmp_path).doors == ["::"]


def test_launch_with_a_restart(tmp_path: Path) -> None:
    job = JOB.replace("def job():", f"def job():{FAILS_ONCE}")
    observed = launch(plan(tmp_path, [1, 1], job), "--epochs", "1", "--restarts", "1")
    assert_closed(observed)
    assert "restart 1 of 1" in observed.output


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [[1], [2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_launch(tmp_path: Path, replicas: list[int], transport: str) -> None:
    job = JOB.replace("Data(data, data)", "Data(data, data, processes=2)")
    assert_closed(launch(plan(tmp_path, replicas, job), "--epochs", "2", "--transport", transport))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_workers_that_are_started_by_hand(tmp_path: Path, world: int) -> None:
    folder = plan(tmp_path, [1] * world).parent
    worker = f"{sys.executable} -m pipeplan_launch {folder} --epochs 1 --run-dir run"
    started = " & ".join(f"RANK={rank} LOCAL_RANK={rank} {worker}" for rank in range(world))
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert_closed(observe(["bash", "-c", f"{started}; wait"], tmp_path, **sizes))


@pytest.mark.slow
def test_inference(tmp_path: Path) -> None:
    assert_closed(launch(plan(tmp_path, [1, 1], mode="inference")))


@pytest.mark.slow
def test_torchrun_sh_of_one_server(tmp_path: Path) -> None:
    profiled = [*PIPEPLAN, "profile", "mnist", "--repeats", "2", "--halvings", "0"]
    assert_closed(observe(profiled, tmp_path), listens=False)
    solved = [*PIPEPLAN, "solve", "profile.json", "--cluster", "local", "--workers", "2", "--force"]
    assert_closed(observe(solved, tmp_path), listens=False)
    assert_closed(observe([*PIPEPLAN, "export", "torchrun", "plan"], tmp_path), listens=False)
    script = tmp_path / "plan" / "torchrun.sh"
    lines = f"PATH={Path(sys.executable).parent}:$PATH\n{script.read_text()} --epochs 1 --log-every 0 --run-dir run"
    script.write_text(lines.replace('"$PLAN"\n', '"$PLAN"'))
    assert_closed(observe(["bash", str(script)], tmp_path))
    assert_closed(observe([*PIPEPLAN, "doctor", "plan"], tmp_path))


@pytest.mark.slow
def test_profile_with_the_trials_of_the_executor(tmp_path: Path) -> None:
    environment = {"PIPEPLAN_EXECUTOR_COSTS": "on", "XDG_CACHE_HOME": str(tmp_path)}
    command = [*PIPEPLAN, "profile", "mnist", "--repeats", "2", "--halvings", "0"]
    assert_closed(observe(command, tmp_path, **environment))


@pytest.mark.slow
@pytest.mark.parametrize("servers", [{}, {"NODE_RANK": "0"}], ids=["alone", "one-of-one"])
def test_profile_links(tmp_path: Path, servers: dict[str, str]) -> None:
    command = [*PIPEPLAN, "profile", "--links", "--workers", "2", "--device", "cpu", "--budget", "0.5"]
    options = ["--servers", "1"] if servers else []
    assert_closed(observe([*command, "-o", "made.toml", *options], tmp_path, **servers))


@pytest.mark.slow
def test_the_self_test(tmp_path: Path) -> None:
    observed = observe([*PIPEPLAN, "doctor", "--selftest"], tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert "messages, host" in observed.output
    assert "MISSING" not in observed.output, observed.output
    assert_closed(observed)
