"""Replays: the emulated plan folder, and real replays that leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import network_namespaces as requirements
import pytest
import replay

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_folder
from pipeplan_launch.plan.stage_files import load_plan

PROFILE = Profile(
    layers=(Layer("a", 0.020, 0.040, 1000, 4_000_000), Layer("b", 0.010, 0.020, 500, 8_000_000)),
    tensors=(Tensor("x", "a", ("b",), 2_000_000, 1_000_000),),
    minibatch=4,
    model_name="small",
)
LACKS = requirements.missing_requirement()


def write(folder: Path) -> Path:
    """A plan folder of two stages on two servers, joined by 10 Gbit/s; its path."""
    levels = (Level("server", 1, 12e9), Level("cluster", 2, 1.25e9))
    problem = Problem(PROFILE, Cluster("test", Device("d", "cuda", 2**34), levels), Options(stages=2))
    plan_folder.write_plan(solve(problem, Settings(solver="dp")), folder)
    return folder


def test_the_executor_reads_the_emulation_and_it_sleeps_as_long_as_the_plan_says(tmp_path: Path) -> None:
    ready = replay.prepare_replay(write(tmp_path / "plan"), PROFILE, 5.0)
    ready.order(tmp_path / "scratch", 60.0)
    plan, scaling = load_plan(tmp_path / "scratch" / "plan"), ready.scaling
    for name, seconds in (("forward_s", (0.020, 0.010)), ("backward_s", (0.040, 0.020))):
        found = [sum(getattr(layer, name) for layer in stage.layers) for stage in plan.emulated]
        assert found == pytest.approx([one * scaling.time_by for one in seconds])
    first, second = plan.emulated
    assert first.before is None
    assert first.after == second.before
    assert first.after is not None
    assert (first.after.sent, first.after.returned) == (scaling.size(2_000_000), scaling.size(1_000_000))
    assert first.minibatches == ready.minibatches
    assert ready.training_s >= 5.0


@pytest.mark.slow
@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_a_replay_is_near_the_prediction(tmp_path: Path) -> None:
    found = replay.replay_plan(write(tmp_path / "plan"), PROFILE, 5.0)
    # Loosely, as nobody knows what else this machine does: a replay whose messages or sleeps were wrong is off by more.
    assert (found.predicted_s, found.measured_s) == (pytest.approx(0.060), pytest.approx(0.060, rel=0.25))
    assert [stage.computing_s for stage in found.stages] == pytest.approx([0.060, 0.030], rel=0.25)


@pytest.mark.slow
@pytest.mark.skipif(bool(LACKS), reason=LACKS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_no_process_stays(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path / "plan")
    (tmp_path / "tmp").mkdir()
    paths = {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(Path(requirements.__file__).parent)}
    command = [sys.executable, replay.__file__, "plan", "--seconds", "100"]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | paths, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("tmp/*/run/metrics/*.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert running(tmp_path)
        process.send_signal(number)
    while running(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # A process that is killed cannot remove its folder.
    assert bool(list(tmp_path.glob("tmp/*"))) == (number is signal.SIGKILL)


def running(folder: Path) -> bool:
    """Whether a process names the folder for temporary files."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder / "tmp").encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False
