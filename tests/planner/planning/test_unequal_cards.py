"""Servers whose own devices differ: their file, their plans, and shares of a batch by speed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checking import changed, fault, written
from long_chains import chain

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.cluster_toml import cluster_toml, read_cluster
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.from_options.choose_order import distinct_orders, in_order
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import FLUSH, STASHING
from pipeplan.planning.baselines import shares_by_speed
from pipeplan.planning.figure import TOLERANCE, figured
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.rendering.plan_folder import write_plan
from pipeplan.rendering.plan_json import stage_documents
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.util.deadline import NO_DEADLINE
from pipeplan_launch.plan.stage_files import load_plan

MIB = 2**20
BIG, SMALL = Device("big", "cuda", 300 * MIB), Device("small", "cuda", 200 * MIB, speed=0.5)
INSIDE = Level("server", 2, 10e9, 1e-5, 0.8, 0.9)
BOX = Cluster.of_devices("box", [BIG, SMALL], INSIDE)
SIZES = [24 * MIB, *[8 * MIB] * 6, 16 * MIB]
MODEL = chain(
    [Layer(f"l{n}", (2 + n % 3) * 1e-3, (4 + n % 2) * 1e-3, size, MIB) for n, size in enumerate(SIZES)],
    65536,
    model_name="chain",
    model_ref="chain",
    graph_hash="sha256:0",
)
"""Layers of unequal times; the first and the last have more weights."""


def read(servers: str) -> Cluster:
    """The cluster of a file with both devices and these tables."""
    devices = "".join(
        f'[[device]]\nname = "{one.name}"\nkind = "cuda"\nmemory = {one.memory_bytes}\nmemory_reserve = 0\n'
        f"speed = {one.speed}\n"
        for one in (BIG, SMALL)
    )
    path = Path("box.toml")
    path.write_text(f'format = "pipeplan-cluster"\nversion = 1\nname = "box"\n{devices}{servers}')
    return read_cluster(path)


def server(devices: str, **more: Any) -> str:
    """A [[server]] table with the links of `INSIDE`."""
    fields = {"bandwidth": '"10 GB/s"', "latency": '"10 us"', "allreduce_efficiency": 0.8, "sendrecv_efficiency": 0.9}
    lines = "".join(f"{name} = {value}\n" for name, value in (fields | more).items())
    return f"[[server]]\n{devices}\n{lines}"


LEVEL = '[[level]]\nname = "cluster"\nbandwidth = "1 GB/s"\n'


def test_a_server_may_list_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mixed = read(server('devices = ["big", "small"]'))
    assert mixed == BOX
    assert (mixed.servers, mixed.server_sizes, mixed.server_of(1), mixed.workers) == (1, (2,), 0, 2)
    assert mixed.server_devices == ("(big + small)",)
    assert read(server('devices = ["big", "big"]')) == read(server('device = "big"\ndevices = 2'))
    boxes = server('devices = ["small", "big"]', price_per_hour=3, name='"alpha"')
    two = read(boxes + server('device = "big"\ndevices = 2') + LEVEL)
    assert (two.servers, two.server_sizes, two.price_per_hour) == (2, (2, 2), None)
    assert [two.server_of(worker) for worker in range(4)] == [0, 0, 1, 1]
    assert two.kinds == [(1, 2, "(small + big)"), (1, 2, "big")]
    assert two.with_servers(1).server_devices == ("(small + big)",)
    for cluster in (mixed, two):
        Path("again.toml").write_text(cluster_toml(cluster))
        assert read_cluster(Path("again.toml")) == cluster
    swapped = in_order(two, (3, 2, 1, 0))
    assert [machine.name for machine in swapped.machines] == ["server 1 of the cluster file"] * 2 + ["alpha"] * 2
    mixed_server = server('devices = ["big", "small"]')
    for servers in (
        mixed_server + server('device = "big"\ndevices = 1') + LEVEL,
        mixed_server + server('device = "big"\ndevices = 2', latency='"20 us"') + LEVEL,
        server('devices = ["big", "small"]', card='"1 GB/s"'),
        server('device = "big"\ndevices = ["big", "small"]'),
        server("devices = 2"),
        server('devices = ["big", "bag"]'),
        server("devices = []"),
        mixed_server + mixed_server + LEVEL.replace("cluster", "server"),
        server('device = "big"\ndevices = 2', count=2) + LEVEL.replace("cluster", "server"),
    ):
        with pytest.raises(InputError):
            read(servers)
    with pytest.raises(InputError, match="share cores"):
        Cluster.of_devices("c", [replace(BIG, cores=1), SMALL], INSIDE)


def by_hand(cluster: Cluster, batch: int = 8) -> float:
    """Seconds per microbatch of the best of all pipelines of two stages that fit, in both orders, by simulation."""
    best = float("inf")
    for order in distinct_orders(cluster):
        problem = Problem(MODEL, in_order(cluster, order), Options(schedule=FLUSH, accumulate=batch, recompute=False))
        names = problem.layer_names
        for cut, depth in itertools.product(range(1, len(names)), (1, 2)):
            plan = Plan((Stage(names[:cut], (0,), depth, 1), Stage(names[cut:], (1,), 1, 1)), 1, False, FLUSH, batch)
            score = evaluate(plan, problem)
            if score.fits:
                best = min(best, figured(plan, score, problem, NO_DEADLINE).step_s)
    return best


@pytest.mark.parametrize("memory", [240, 300, 900])
def test_the_plan_is_as_good_as_every_split_by_hand(memory: int) -> None:
    """Where the whole model does not fit, and where it does."""
    devices = [replace(BIG, memory_bytes=memory * MIB), replace(SMALL, memory_bytes=memory * MIB * 2 // 3)]
    for order in (devices, devices[::-1]):
        cluster = Cluster.of_devices("box", order, INSIDE)
        found = pipeplan.solve(MODEL, cluster, batch=8, microbatch=1, recompute=False)
        assert found.predicted_s <= by_hand(cluster) * (1 + TOLERANCE)
        assert found.evaluation.fits
        kinds = {one.kind for one in found.choice.rivals}
        assert ("DDP by speed" in kinds) == (memory == 900)
        assert "pipeline" in kinds


def test_shares_end_as_early_as_any() -> None:
    for speeds, count in (((1.0, 0.5), 8), ((1.0, 0.35), 8), ((0.5, 1.0, 0.3), 10), ((1.0, 0.01), 4)):
        shares = shares_by_speed(speeds, count)
        assert sum(shares) == count
        ways = (way for way in itertools.product(range(count + 1), repeat=len(speeds)) if sum(way) == count)
        ends = [max(share / speed for share, speed in zip(way, speeds, strict=True)) for way in [shares, *ways]]
        assert ends[0] == min(ends)


def test_a_batch_is_divided_by_speed(tmp_path: Path) -> None:
    devices = [replace(SMALL, memory_bytes=900 * MIB), replace(BIG, memory_bytes=900 * MIB)]
    options = Options(schedule=FLUSH, accumulate=8, stages=1, unequal_shares=True)
    found = solve(Problem(MODEL, Cluster.of_devices("box", devices, INSIDE), options))
    (stage,) = found.plan.stages
    assert (found.plan.config, stage.shares, found.evaluation.bound) == ("3:5", (3, 5), "compute of stage 1")
    passes_s = sum(layer.forward_s + layer.backward_s for layer in MODEL.layers)
    # The slow worker takes longest: 3 microbatches at half the speed.
    assert found.predicted_s * 8 == pytest.approx(6 * passes_s, rel=0.02)
    assert found.predicted_s * 8 > 6 * passes_s
    assert found.figure.simulated_s is not None
    (load,) = scenario_of_plan(found.plan, found.problem, found.evaluation).stages
    assert load.at_once == pytest.approx(8 / 3)
    assert (load.of_replica(0).forward_s, load.of_replica(1).forward_s) == (load.forward_s, load.forward_s / 2)
    write_plan(found, tmp_path / "plan")
    runs = load_plan(tmp_path / "plan")
    assert (runs.pipeline[0].shares, runs.device_names, runs.data_parallel) == ((3, 5), ("small", "big"), "ddp")
    document = written(found)
    assert fault(document, MODEL) == ""
    for shares in ([4, 4], [3, 4], [8], []):
        assert fault(changed(document, lambda d: d["plan"]["stages"][0].update(shares=shares)), MODEL)  # noqa: B023
    for changes in ({"stages": 2}, {"schedule": STASHING, "accumulate": None}, {"sharding": Sharding.OPTIMIZER}):
        with pytest.raises(InputError, match="unequal shares"):
            replace(options, **changes)


def test_the_executor_gets_names_only_where_devices_of_a_server_differ() -> None:
    for cluster, names in ((BOX, ["big", "small"]), (Cluster("u", BIG, (INSIDE,)), None)):
        outcome = solve(Problem(MODEL, cluster, Options(stages=2)), Settings("dp", simulate=False))
        assert stage_documents(outcome)[0].get("device_names") == names
