"""Replays: the cluster as a tree of cables, the emulated plan folder, and one real replay that leaves nothing."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import emulation
import network_namespaces as requirements
import pytest
import replay
from replay_network import (
    LEAST_TIME_BY,
    OWN_S,
    OWN_SHARE,
    WAITING_SHARE,
    NetworkPart,
    Rings,
    Scaling,
    network_tree,
    parts_of,
    scaling_for,
)

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_folder
from pipeplan.simulation.scenario import Scenario, StageBoundary, StageLoad
from pipeplan_launch.plan.schedule import SCHEDULES
from pipeplan_launch.plan.stage_files import load_plan

PROFILE = Profile(
    layers=(Layer("a", 0.020, 0.040, 1000, 4_000_000), Layer("b", 0.010, 0.020, 500, 8_000_000)),
    tensors=(Tensor("x", "a", ("b",), 2_000_000, 1_000_000),),
    minibatch=4,
    model_name="small",
)
GIGABIT = 125e6
"""Bytes/s."""
LACKS = requirements.missing_requirement()


def cluster(*levels: tuple[str, int, float]) -> Cluster:
    """(name, count, bytes/s), innermost first."""
    return Cluster("test", Device("d", "cuda", 2**34), tuple(Level(*level) for level in levels))


def two_servers(each: int = 1) -> Cluster:
    """Joined by 10 Gbit/s."""
    return cluster(("server", each, 12e9), ("cluster", 2, 10 * GIGABIT))


def write(folder: Path, on: Cluster, stages: int) -> Path:
    """A plan folder; its path."""
    problem = Problem(PROFILE, on, Options(stages=stages))
    plan_folder.write_plan(solve(problem, Settings(solver="dp")), folder)
    return folder


def test_cables_are_those_of_servers_and_of_workers_where_links_inside_are_as_slow() -> None:
    five, ten = 5 * GIGABIT, 10 * GIGABIT
    racks = cluster(("server", 1, 12e9), ("rack", 2, ten), ("cluster", 2, five))
    cases = (
        (parts_of(two_servers(each=4)), {"server 0": ten, "server 1": ten}),
        (parts_of(cluster(("server", 3, GIGABIT))), {f"worker {number}": GIGABIT for number in range(3)}),
        (
            parts_of(two_servers(each=2), {2, 3}),  # the plan is on one server
            {"server 0": ten, "worker 0": 12e9, "worker 1": 12e9, "server 1": ten, "worker 2": 12e9, "worker 3": 12e9},
        ),
        (parts_of(racks), {"rack 0": five, "rack 1": five} | {f"server {number}": ten for number in range(4)}),
    )
    for tree, cables in cases:
        assert {part.name: part.rate for part in tree.cables} == cables
    slow, fast = (parts_of(cluster(("server", 2, rate), ("cluster", 2, 1e9))) for rate in (2e9, 2.1e9))
    assert slow.shapes_inside
    assert not fast.shapes_inside


def test_a_ring_carries_more_where_it_is_less_efficient_than_messages() -> None:
    level = Level("cluster", 4, 1e9, 0.0, 0.4, 0.8)
    on = Cluster("t", Device("d", "cuda", 2**30), (Level("server", 1, 0.0), level))
    rings = Rings(Plan((Stage(("a",), (0, 1, 2, 3), 1, 1),)), on, parts_of(on))
    assert rings.inflation(0) == pytest.approx(2.0)
    # 25 MiB twice over, by 100; the shaped rate is 0.8e9 / 100 / 3, at which 4 workers' steps of 2 ms are 21 kB.
    assert rings.bucket_bytes(0, Scaling(100, 3)) == pytest.approx(2 * 25 * 2**20 / 100, abs=1)
    fast = cluster(("server", 2, 2.1e9), ("cluster", 2, 1e9))
    plan = Plan((Stage(("a",), (0, 1), 1, 1), Stage(("b",), (2, 3), 1, 1)))
    assert Rings(plan, fast, parts_of(fast)).inflation(0) == 1.0, "its ring passes no shaped link"


def test_rates_are_divided_by_both_scales() -> None:
    tree = network_tree(parts_of(two_servers()), Scaling(bytes_by=100, time_by=3))
    # 10 Gbit/s / 100 / 3, and 1.1% for headers.
    assert tree["below"][0] == {"name": "server 0", "workers": 1, "rate": "33700000bit"}
    alone = network_tree(NetworkPart("server 0", math.inf, (0, 1)), Scaling(100, 3))
    assert alone == {"name": "", "below": [{"name": "server 0", "workers": 2}]}, "the root is a switch"
    for scaling in (Scaling(20, 1), Scaling(137, 3), Scaling(1000, 2.5)):
        assert scaling.size(1e9) / scaling.rate(1e9) == pytest.approx(scaling.time_by, rel=1e-6)


def test_the_executor_reads_the_emulation_and_it_sleeps_as_long_as_the_plan_says(tmp_path: Path) -> None:
    ready = replay.prepare_replay(write(tmp_path / "plan", two_servers(), stages=2), PROFILE, 5.0)
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


def test_more_workers_than_the_machine_can_emulate_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    replay.prepare_replay(write(tmp_path / "most", two_servers(each=16), stages=1), PROFILE, 5.0)
    with pytest.raises(InputError, match="the cluster has 34 workers, and this machine can emulate 32"):
        replay.prepare_replay(write(tmp_path / "more", two_servers(each=17), stages=1), PROFILE, 5.0)


def loaded(*stages: tuple[int, float], schedule: str, step_time_s: float, accumulate: int | None = None) -> Scenario:
    """Stages as (replicas, seconds of a forward and a backward pass) that exchange nothing."""
    loads, worker = [], 0
    for replicas, seconds in stages:
        loads.append(StageLoad(tuple(range(worker, worker + replicas)), 1, seconds / 3, 2 * seconds / 3, 0.0))
        worker += replicas
    hops = ((StageBoundary(0.0, 0.0),),) * (len(stages) - 1)
    return Scenario("t", tuple(loads), hops, SCHEDULES[schedule], 1.0, step_time_s, accumulate=accumulate)


def test_times_are_stretched_until_the_executor_does_not_count() -> None:
    # Of 20 ms the second stage waits 0.1 ms, a quarter of which may be lost, and 2% more: 0.425 ms for 5.
    tight = loaded((1, 0.010), (1, 0.0199), schedule="1f1b-stashing", step_time_s=0.020)
    assert scaling_for(tight, [1.0, 1.0]).time_by == pytest.approx(OWN_S / (WAITING_SHARE * 0.0001 + OWN_SHARE * 0.020))
    # Two replicas that wait for half of the time have no need of it.
    idle = loaded((1, 0.010), (2, 0.020), schedule="1f1b-stashing", step_time_s=0.020)
    assert scaling_for(idle, [1.0, 1.0]).time_by == LEAST_TIME_BY
    # Where the pipeline drains: two minibatches on a replica and one through the other, in 2% of 4 × 10 ms.
    drained = loaded((2, 0.010), (4, 0.010), schedule="gpipe", step_time_s=0.010, accumulate=4)
    assert scaling_for(drained, [1.0, 1.0]).time_by == pytest.approx(3 * OWN_S / (OWN_SHARE * 0.040))


@pytest.mark.skipif(sys.platform != "linux", reason="replays need Linux")
def test_workers_are_ended_once_the_time_is_up() -> None:
    endless, failing, well = "import time; time.sleep(100)", "raise SystemExit(3)", ""
    for programs, limit_s, statuses, late in (
        ([well, well], 60.0, {0: 0, 1: 0}, False),
        ([endless, endless], 0.0, {0: -9, 1: -9}, True),
        ([failing, well], 60.0, {0: 3, 1: 0}, False),
    ):
        started = [os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", one], os.environ) for one in programs]
        ranks = {pid: rank for rank, pid in enumerate(started)}
        assert emulation._finish(ranks, time.monotonic() + limit_s) == (statuses, late)


@pytest.mark.slow
@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_a_replay_is_near_the_prediction(tmp_path: Path) -> None:
    found = replay.replay_plan(write(tmp_path / "plan", two_servers(), stages=2), PROFILE, 5.0)
    # Loosely, as nobody knows what else this machine does: a replay whose messages or sleeps were wrong is off by more.
    assert (found.predicted_s, found.measured_s) == (pytest.approx(0.060), pytest.approx(0.060, rel=0.25))
    assert [stage.computing_s for stage in found.stages] == pytest.approx([0.060, 0.030], rel=0.25)


@pytest.mark.slow
@pytest.mark.skipif(bool(LACKS), reason=LACKS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_no_process_stays(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path / "plan", two_servers(), stages=2)
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
