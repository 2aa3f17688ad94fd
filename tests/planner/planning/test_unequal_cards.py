"""Servers whose own devices differ: their file, their plans, and shares of a batch by speed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipeplan
from pipeplan.checker.verify import check_plan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.cluster_toml import cluster_toml, read_cluster
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.from_options.choose_order import distinct_orders, in_order
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import FLUSH, STASHING
from pipeplan.planning.baselines import shares_by_speed
from pipeplan.planning.figure import TOLERANCE, figured
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.plan_file import PLAN_FORMAT, PLAN_VERSION
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.plan_folder import write_plan
from pipeplan.rendering.plan_json import stage_documents
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.util.deadline import NO_DEADLINE
from pipeplan.util.files import read_document
from pipeplan_launch.plan.stage_files import load_plan

MIB = 2**20
BIG, SMALL = Device("big", "cuda", 300 * MIB), Device("small", "cuda", 200 * MIB, speed=0.5)
INSIDE = Level("server", 2, 10e9, 1e-5, 0.8, 0.9)
BOX = Cluster.of_devices("box", [BIG, SMALL], INSIDE)


def model(layers: int = 8, weights: int = 8 * MIB) -> Profile:
    """A chain of layers of unequal times; the first and the last have more weights."""
    sizes = [3 * weights, *[weights] * (layers - 2), 2 * weights]
    made = tuple(Layer(f"l{n}", (2 + n % 3) * 1e-3, (4 + n % 2) * 1e-3, size, MIB) for n, size in enumerate(sizes))
    flows = tuple(Tensor(f"l{n}", f"l{n}", (f"l{n + 1}",), 65536, 65536) for n in range(layers - 1))
    return Profile(made, flows, 1, model_name="chain", model_ref="chain", graph_hash="sha256:0")


def written(folder: Path, servers: str) -> Cluster:
    """The cluster of a file with both devices and these tables."""
    devices = "".join(
        f'[[device]]\nname = "{one.name}"\nkind = "cuda"\nmemory = {one.memory_bytes}\nmemory_reserve = 0\n'
        f"speed = {one.speed}\n"
        for one in (BIG, SMALL)
    )
    path = folder / "box.toml"
    path.write_text(f'format = "pipeplan-cluster"\nversion = 1\nname = "box"\n{devices}{servers}')
    return read_cluster(path)


def server(devices: str, **more: Any) -> str:
    """A [[server]] table with the links of `INSIDE`."""
    fields = {"bandwidth": '"10 GB/s"', "latency": '"10 us"', "allreduce_efficiency": 0.8, "sendrecv_efficiency": 0.9}
    lines = "".join(f"{name} = {value}\n" for name, value in (fields | more).items())
    return f"[[server]]\n{devices}\n{lines}"


LEVEL = '[[level]]\nname = "cluster"\nbandwidth = "1 GB/s"\n'


def test_a_server_may_list_its_devices(tmp_path: Path) -> None:
    mixed = written(tmp_path, server('devices = ["big", "small"]'))
    assert mixed == BOX
    assert (mixed.servers, mixed.server_sizes, mixed.server_of(1), mixed.workers) == (1, (2,), 0, 2)
    assert mixed.server_devices == ("(big + small)",)
    assert written(tmp_path, server('devices = ["big", "big"]')) == written(
        tmp_path, server('device = "big"\ndevices = 2')
    )
    boxes = server('devices = ["small", "big"]', price_per_hour=3, name='"alpha"') + server(
        'device = "big"\ndevices = 2'
    )
    two = written(tmp_path, boxes + LEVEL)
    assert (two.servers, two.server_sizes, two.price_per_hour) == (2, (2, 2), None)
    assert [two.server_of(worker) for worker in range(4)] == [0, 0, 1, 1]
    assert two.kinds == [(1, 2, "(small + big)"), (1, 2, "big")]
    assert two.with_servers(1).server_devices == ("(small + big)",)
    for cluster in (mixed, two):
        path = tmp_path / "again.toml"
        path.write_text(cluster_toml(cluster))
        assert read_cluster(path) == cluster
    swapped = in_order(two, (3, 2, 1, 0))
    assert [machine.name for machine in swapped.machines] == ["server 1 of the cluster file"] * 2 + ["alpha"] * 2


def test_what_such_a_file_cannot_say(tmp_path: Path) -> None:
    mixed = server('devices = ["big", "small"]')
    for servers in (
        mixed + server('device = "big"\ndevices = 1') + LEVEL,
        mixed + server('device = "big"\ndevices = 2', latency='"20 us"') + LEVEL,
        server('devices = ["big", "small"]', card='"1 GB/s"'),
        server('device = "big"\ndevices = ["big", "small"]'),
        server("devices = 2"),
        server('devices = ["big", "bag"]'),
        server("devices = []"),
        mixed + mixed + LEVEL.replace("cluster", "server"),
        server('device = "big"\ndevices = 2', count=2) + LEVEL.replace("cluster", "server"),
    ):
        with pytest.raises(InputError):
            written(tmp_path, servers)
    with pytest.raises(InputError, match="share cores"):
        Cluster.of_devices("c", [replace(BIG, cores=1), SMALL], INSIDE)


@pytest.mark.parametrize("schedule", [FLUSH, STASHING])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_devices_that_hardly_differ_have_the_plan_of_equal_ones(schedule: str, workers: int) -> None:
    """The devices of a server as machines of their own, beside a server of equal devices on slow links."""
    slow = replace(INSIDE, bandwidth=5e8)
    devices = [replace(BIG, name=str(n), speed=1 + n * 1e-9) for n in range(workers)]
    options = Options(schedule=schedule, accumulate=8 if schedule == FLUSH else None)
    found = [
        solve(Problem(model(), cluster, options), Settings(simulate=False))
        for cluster in (
            Cluster("equal", BIG, (replace(slow, count=workers),)),
            Cluster.of_devices("nearly", devices, slow),
        )
    ]
    assert found[1].plan.config == found[0].plan.config
    assert found[1].predicted_s == pytest.approx(found[0].predicted_s, rel=1e-6)
    assert found[1].bound_s == pytest.approx(found[0].bound_s, rel=1e-6)
    assert found[1].verdict.agree


def answer(profile: Profile, cluster: Cluster, batch: int = 8) -> Outcome:
    return pipeplan.solve(profile, cluster, batch=batch, microbatch=1, recompute=False)


def by_hand(profile: Profile, cluster: Cluster, batch: int = 8) -> float:
    """Seconds per microbatch of the best of all pipelines of two stages that fit, in both orders, by simulation."""
    best = float("inf")
    for order in distinct_orders(cluster):
        problem = Problem(profile, in_order(cluster, order), Options(schedule=FLUSH, accumulate=batch, recompute=False))
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
        found = answer(model(), cluster)
        assert found.predicted_s <= by_hand(model(), cluster) * (1 + TOLERANCE)
        assert found.evaluation.fits
        assert found.choice is not None
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


def unequal(memory: int = 900) -> Outcome:
    """The best plan with unequal shares of 8 microbatches."""
    devices = [replace(SMALL, memory_bytes=memory * MIB), replace(BIG, memory_bytes=memory * MIB)]
    options = Options(schedule=FLUSH, accumulate=8, stages=1, unequal_shares=True)
    return solve(Problem(model(), Cluster.of_devices("box", devices, INSIDE), options))


def wrong_in(path: Path, outcome: Outcome) -> list[str]:
    """What the checker finds wrong in a plan.json, but for its checksum."""
    root = read_document(path, PLAN_FORMAT, PLAN_VERSION)
    return [one.what for one in check_plan(root, outcome.problem.profile).results if one.holds is False]


def test_a_batch_is_divided_by_speed(tmp_path: Path) -> None:
    found = unequal()
    (stage,) = found.plan.stages
    assert (found.plan.config, stage.shares, found.evaluation.bound) == ("3:5", (3, 5), "compute of stage 1")
    layers = found.problem.profile.layers
    passes_s = sum(layer.forward_s + layer.backward_s for layer in layers)
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
    path = tmp_path / "plan" / "plan.json"
    assert not wrong_in(path, found)
    for shares in ([4, 4], [3, 4], [8], []):
        content = json.loads(path.read_text())
        content["plan"]["stages"][0]["shares"] = shares
        (tmp_path / "forged.json").write_text(json.dumps(content))
        assert wrong_in(tmp_path / "forged.json", found), shares


def test_unequal_shares_are_for_plain_data_parallelism() -> None:
    for changes in ({"stages": 2}, {"schedule": STASHING, "accumulate": None}, {"sharding": Sharding.OPTIMIZER}):
        with pytest.raises(InputError, match="unequal shares"):
            Options(**{"schedule": FLUSH, "accumulate": 8, "stages": 1, "unequal_shares": True} | changes)


def test_the_executor_gets_names_only_where_devices_of_a_server_differ() -> None:
    settings = Settings("dp", simulate=False)
    pipeline = solve(Problem(model(), BOX, Options(stages=2)), settings)
    assert stage_documents(pipeline)[0]["device_names"] == ["big", "small"]
    uniform = Problem(model(), Cluster("u", BIG, (INSIDE,)), Options(stages=2))
    assert "device_names" not in stage_documents(solve(uniform, settings))[0]
