"""The cluster as a tree of cables, what crosses them, and the plan folder for the executor."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from replay_builders import GIGABIT, PROFILE, cluster, two_servers, write
from replay_network import (
    LEAST_TIME_BY,
    OWN_S,
    OWN_SHARE,
    WAITING_SHARE,
    LinkUse,
    NetworkPart,
    Rings,
    Scaling,
    network_tree,
    parts_of,
    scaling_for,
    unshaped_levels,
    with_predictions,
)
from replay_run import prepare_replay

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.simulation.scenario import Scenario, StageBoundary, StageLoad
from pipeplan.util.files import read_document
from pipeplan_launch.plan.schedule import SCHEDULES
from pipeplan_launch.plan.stage_files import load_plan


def cables(on: Cluster) -> list[tuple[str, float]]:
    return [(part.name, part.rate) for part in parts_of(on).cables]


def test_servers_have_a_cable_each_and_their_insides_none() -> None:
    on = two_servers(each=4)
    assert cables(on) == [("server 0", 10 * GIGABIT), ("server 1", 10 * GIGABIT)]
    assert [part.workers for part in parts_of(on).leaves] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert unshaped_levels(on, parts_of(on)) == ("server",)


def test_a_single_server_has_a_cable_for_every_worker() -> None:
    on = cluster(("server", 3, GIGABIT))
    assert cables(on) == [(f"worker {number}", GIGABIT) for number in range(3)]
    assert unshaped_levels(on, parts_of(on)) == ()


def test_a_plan_on_one_of_several_servers_has_a_cable_for_every_worker() -> None:
    on = two_servers(each=2)
    assert [part.name for part in parts_of(on, {2, 3}).cables] == [
        "server 0", "worker 0", "worker 1", "server 1", "worker 2", "worker 3"
    ]  # fmt: skip
    assert parts_of(on, {2, 3}).cables[1].rate == 12e9
    assert unshaped_levels(on, parts_of(on, {2, 3})) == ()
    assert not parts_of(on, {1, 2}).shapes_inside


def test_racks_have_cables_above_those_of_servers() -> None:
    on = cluster(("server", 1, 12e9), ("rack", 2, 10 * GIGABIT), ("cluster", 2, 5 * GIGABIT))
    ten, five = 10 * GIGABIT, 5 * GIGABIT
    servers = [f"server {number}" for number in range(4)]
    assert cables(on) == [("rack 0", five), *((one, ten) for one in servers[:2]), ("rack 1", five)] + [
        (one, ten) for one in servers[2:]
    ]
    assert unshaped_levels(on, parts_of(on)) == (), "one worker a server: nothing is inside"
    assert [leaf.workers for leaf in parts_of(on).leaves] == [(0,), (1,), (2,), (3,)]


def test_links_inside_are_cables_where_they_are_about_as_slow() -> None:
    slow, fast = (cluster(("server", 2, rate), ("cluster", 2, 1e9)) for rate in (2e9, 2.1e9))
    assert parts_of(slow).shapes_inside
    assert [part.name for part in parts_of(slow).cables][:3] == ["server 0", "worker 0", "worker 1"]
    assert not parts_of(fast).shapes_inside
    plan = Plan((Stage(("a",), (0, 1), 1, 1), Stage(("b",), (2, 3), 1, 1)))
    assert Rings(plan, fast, parts_of(fast)).inflation(0) == 1.0, "its ring passes no shaped link"


def test_a_ring_carries_more_where_it_is_less_efficient_than_messages() -> None:
    level = Level("cluster", 4, 1e9, 0.0, 0.4, 0.8)
    on = Cluster("t", Device("d", "cuda", 2**30), (Level("server", 1, 0.0), level))
    plan = Plan((Stage(("a",), (0, 1, 2, 3), 1, 1),))
    rings = Rings(plan, on, parts_of(on))
    assert rings.inflation(0) == pytest.approx(2.0)
    # 25 MiB twice over, by 100; the shaped rate is 0.8e9 / 100 / 3, at which 4 workers' steps of 2 ms are 21 kB.
    assert rings.bucket_bytes(0, Scaling(100, 3)) == pytest.approx(2 * 25 * 2**20 / 100, abs=1)


def test_rates_are_divided_by_both_scales() -> None:
    tree = network_tree(parts_of(two_servers()), Scaling(bytes_by=100, time_by=3))
    # 10 Gbit/s / 100 / 3, and 1.1% for headers.
    assert tree["below"][0] == {"name": "server 0", "workers": 1, "rate": "33700000bit"}
    alone = network_tree(NetworkPart("server 0", math.inf, (0, 1)), Scaling(100, 3))
    assert alone == {"name": "", "below": [{"name": "server 0", "workers": 2}]}, "the root is a switch"


@pytest.mark.parametrize(("bytes_by", "time_by"), [(20, 1), (137, 3), (1000, 2.5)])
def test_a_message_takes_as_many_times_longer_as_a_pass(bytes_by: float, time_by: float) -> None:
    scaling = Scaling(bytes_by, time_by)
    assert scaling.size(1e9) / scaling.rate(1e9) == pytest.approx(time_by, rel=1e-6)


def test_what_a_straight_plan_sends_is_predicted(tmp_path: Path) -> None:
    folder = write(tmp_path / "plan", two_servers(), stages=2)
    root = read_document(folder / "plan.json", "pipeplan-plan", 1)
    servers = parts_of(two_servers())
    uses = [LinkUse("server 0", 10 * GIGABIT, way, 0.0, 0.0) for way in ("out", "in")]
    out, back = with_predictions(uses, servers, root)
    assert out.predicted_bytes == pytest.approx(2_000_000), "activations leave the first server"
    assert back.predicted_bytes == pytest.approx(1_000_000), "gradients come back"
    assert out.predicted_busy == pytest.approx(2_000_000 / (10 * GIGABIT) / root["prediction"]["minibatch_s"].number())


def test_what_data_parallelism_sends_is_predicted(tmp_path: Path) -> None:
    folder = write(tmp_path / "plan", two_servers(), stages=1)
    root = read_document(folder / "plan.json", "pipeplan-plan", 1)
    (use,) = with_predictions([LinkUse("server 1", 10 * GIGABIT, "out", 0.0, 0.0)], parts_of(two_servers()), root)
    # Of a ring of two each sends the 1500 bytes of the parameters once, for every two minibatches.
    assert use.predicted_bytes == pytest.approx(1500 / 2)


def test_the_executor_reads_the_emulation_and_it_sleeps_as_long_as_the_plan_says(tmp_path: Path) -> None:
    ready = prepare_replay(write(tmp_path / "plan", two_servers(), stages=2), PROFILE, 5.0)
    (tmp_path / "scratch").mkdir()
    order = ready.order(tmp_path / "scratch", 60.0, ["--log-every", "0"])
    plan = load_plan(tmp_path / "scratch" / "plan")
    scaling = ready.scaling
    assert [sum(layer.forward_s for layer in stage.layers) for stage in plan.emulated] == pytest.approx(
        [0.020 * scaling.time_by, 0.010 * scaling.time_by]
    )
    assert [sum(layer.backward_s for layer in stage.layers) for stage in plan.emulated] == pytest.approx(
        [0.040 * scaling.time_by, 0.020 * scaling.time_by]
    )
    first, second = plan.emulated
    assert first.before is None
    assert first.after == second.before
    assert first.after is not None
    assert first.after.sent == scaling.size(2_000_000)
    assert first.after.returned == scaling.size(1_000_000)
    assert first.minibatches == ready.minibatches
    assert order["arguments"][-2:] == ["--log-every", "0"]
    assert ready.minibatches * ready.pace_s >= 5.0


def test_more_workers_than_the_machine_can_emulate_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    prepare_replay(write(tmp_path / "most", two_servers(each=16), stages=1), PROFILE, 5.0)
    with pytest.raises(InputError, match="the cluster has 34 workers, and this machine can emulate 32"):
        prepare_replay(write(tmp_path / "more", two_servers(each=17), stages=1), PROFILE, 5.0)


def _loaded(*stages: tuple[int, float], schedule: str, pace_s: float, accumulate: int | None = None) -> Scenario:
    """Stages as (replicas, seconds of a forward and a backward pass) that exchange nothing."""
    loads, worker = [], 0
    for replicas, seconds in stages:
        loads.append(StageLoad(tuple(range(worker, worker + replicas)), 1, seconds / 3, 2 * seconds / 3, 0.0))
        worker += replicas
    hops = ((StageBoundary(0.0, 0.0),),) * (len(stages) - 1)
    return Scenario("t", tuple(loads), hops, SCHEDULES[schedule], 1.0, pace_s, accumulate=accumulate)


def test_a_stage_that_hardly_waits_is_stretched_until_the_executor_does_not_count() -> None:
    """Of 20 ms the second stage waits 0.1 ms, a quarter of which may be lost, and 2% more: 0.425 ms for 5."""
    tight = _loaded((1, 0.010), (1, 0.0199), schedule="1f1b-stashing", pace_s=0.020)
    assert scaling_for(tight, [1.0, 1.0]).time_by == pytest.approx(OWN_S / (WAITING_SHARE * 0.0001 + OWN_SHARE * 0.020))
    # Two replicas that wait for half of the time have no need of it.
    idle = _loaded((1, 0.010), (2, 0.020), schedule="1f1b-stashing", pace_s=0.020)
    assert scaling_for(idle, [1.0, 1.0]).time_by == LEAST_TIME_BY


def test_waiting_does_not_make_up_for_the_executor_where_the_pipeline_drains() -> None:
    """Two minibatches on a replica of the first stage, and one through the other: 3 times 5 ms, in 2% of 4 × 10 ms."""
    drained = _loaded((2, 0.010), (4, 0.010), schedule="gpipe", pace_s=0.010, accumulate=4)
    assert scaling_for(drained, [1.0, 1.0]).time_by == pytest.approx(3 * OWN_S / (OWN_SHARE * 0.040))
