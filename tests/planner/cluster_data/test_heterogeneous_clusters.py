"""Clusters whose servers differ: what a file says of them, and what plans on them cost."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from instances import drawn, random_instance

from pipeplan.cluster_data.cluster import MEMORY_RESERVE, Cluster, Device, Level, Server
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.cluster_data.cluster_toml import load_cluster
from pipeplan.cluster_data.links import Links
from pipeplan.cost.contention import card_loads
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.util.files import Node

MIXED = """
format = "pipeplan-cluster"
version = 1
name = "mixed"
[[device]]
name = "big"
kind = "cuda"
memory = "16 GiB"
[[device]]
name = "small"
kind = "cuda"
memory = "8 GiB"
speed = 0.5
[[server]]
count = 2
device = "big"
devices = 4
bandwidth = "12 GB/s"
price_per_hour = 10
[[server]]
device = "small"
devices = 2
bandwidth = "6 GB/s"
card = "5 Gbit/s"
price_per_hour = 1.5
[[level]]
name = "cluster"
bandwidth = "10 Gbit/s"
latency = "50 us"
allreduce_efficiency = 0.5
"""


def _saved(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mixed.toml"
    path.write_text(text)
    return str(path)


def _servers(*sizes: int, speeds: tuple[float, ...] = (), cards: tuple[float, ...] = (), rack: int = 0) -> Cluster:
    """Servers of these sizes with 100 bytes/s inside and 10 between; in racks of `rack`, 5 bytes/s between those."""
    machines = [
        Server(Device("d", "cpu", 1000, speed), Level("server", size, 100.0), card)
        for size, speed, card in zip(sizes, speeds or [1.0] * len(sizes), cards or [0.0] * len(sizes), strict=True)
    ]
    if not rack:
        return Cluster.of_servers("t", machines, [Level("cluster", len(sizes), 10.0, 0.25)])
    above = [Level("rack", rack, 10.0, 0.25), Level("cluster", len(sizes) // rack, 5.0)]
    return Cluster.of_servers("t", machines, above)


def _score(cluster: Cluster, *stages: tuple[str, tuple[int, ...], int], copies: int = 1) -> Evaluation:
    """The cost of a plan of a → b → c with a skip a → c."""
    profile = Profile(
        layers=(Layer("a", 2.0, 4.0, 50, 5), Layer("b", 1.0, 2.0, 20, 7), Layer("c", 0.5, 1.0, 100, 9)),
        tensors=(Tensor("x", "a", ("b", "c"), 40, 30), Tensor("y", "b", ("c",), 8, 8)),
        minibatch=1,
    )
    placed = tuple(Stage(tuple(layers), workers, depth, depth) for layers, workers, depth in stages)
    return evaluate(Plan(placed, copies), Problem(profile, cluster, Options(contention=False)))


def test_a_file_lists_what_differs(tmp_path: Path) -> None:
    cluster = load_cluster(_saved(tmp_path, MIXED))
    assert not cluster.uniform
    assert (cluster.workers, cluster.servers, cluster.server_sizes) == (10, 3, (4, 4, 2))
    assert [device.name for device in cluster.devices] == ["big"] * 8 + ["small"] * 2
    assert cluster.device_of(9).memory_bytes == 8 * 2**30
    assert (cluster.speed_of([0, 7]), cluster.speed_of([7, 8])) == (1.0, 0.5)
    assert cluster.memory_of([7, 8]) == int(8 * 2**30 * (1 - MEMORY_RESERVE))
    assert cluster.total_speed == 9.0
    assert cluster.price_per_hour == 21.5
    assert cluster.levels[-1].count == 3


def test_a_message_runs_at_the_slowest_card_that_its_component_joins() -> None:
    links = Links.of(_servers(2, 2, 2, 2, cards=(0.0, 4.0, 0.0, 40.0), rack=2))
    assert [links.sendrecv(2, worker) for worker in (0, 3, 4)] == [(4.0, 0.25), (4.0, 0.25), (10.0, 0.25)]
    assert links.sendrecv(3, 7) == (4.0, 0.25)
    assert links.sendrecv(1, 2) == (100.0, 0.0)
    assert links.sendrecv_among([4, 7]) == (10.0, 0.25)
    # A card faster than the level's links changes nothing.
    assert [links.card(1, worker)[0] for worker in (0, 2, 6)] == [10.0, 4.0, 10.0]
    assert (links.card(2, 0)[0], links.card(3, 0)[0], links.card(0, 0)[0]) == (5.0, float("inf"), 100.0)
    # Servers that a message passes by do not slow it down.
    assert links.sendrecv_among([0, 1, 4]) == (5.0, 0.25)
    assert links.sendrecv_among([1, 2]) == links.sendrecv_among([0, 3]) == (4.0, 0.25)
    assert links.sendrecv_among([2, 3]) == (100.0, 0.0)
    fast = Links.of(_servers(2, 2, 2, cards=(0.0, 0.0, 4.0)))
    assert fast.sendrecv_among([0, 3]) == fast.allreduce_among([0, 1, 2]) == (10.0, 0.25)
    assert fast.sendrecv_among([0, 4]) == (4.0, 0.25)
    assert fast.ways[2].sendrecv.tolist() == [10.0] * 4 + [4.0] * 2


def test_efficiencies_and_single_devices_count_as_elsewhere(tmp_path: Path) -> None:
    links = Links.of(load_cluster(_saved(tmp_path, MIXED.replace("devices = 2", "devices = 1"))))
    assert links.allreduce(2, 0) == (5e9 / 8 * 0.5, 50e-6)
    assert links.sendrecv(2, 0) == (5e9 / 8, 50e-6)
    assert links.sendrecv(1, 8) == (float("inf"), 0.0)


def test_a_stage_is_as_fast_as_its_slowest_worker_and_has_the_memory_of_its_smallest() -> None:
    cluster = _servers(2, 2, speeds=(1.0, 0.5))
    score = _score(cluster, ("a", (0, 1), 9), ("bc", (2, 3), 1))
    assert score.stages[0].compute_s == pytest.approx(6 / 2)
    assert score.stages[1].compute_s == pytest.approx(4.5 / (2 * 0.5))
    assert score.stages[1].forward_s == pytest.approx(1.5 / 0.5)
    mixed = _score(cluster, ("abc", (1, 2), 1))
    assert mixed.stages[0].compute_s == pytest.approx(10.5 / (2 * 0.5))
    smaller = replace(cluster.machines[1], device=Device("d", "cpu", 300, 0.5))
    tight = replace(cluster, machines=(cluster.machines[0], smaller))
    assert [stage.capacity_bytes for stage in _score(tight, ("a", (0, 1), 2), ("bc", (2, 3), 1)).stages] == [1000, 300]
    assert _score(tight, ("abc", (0, 1), 1)).fits
    assert not _score(tight, ("abc", (1, 2), 1)).fits


def _listed(cluster: Cluster) -> Cluster:
    """The same cluster with its servers listed one by one."""
    return Cluster.of_servers("t", [Server(cluster.device, cluster.levels[0])] * cluster.servers, cluster.levels[1:])


def _random_plan(rng: random.Random, problem: Problem) -> Plan:
    """Stages on runs of workers; in copies where the cluster has some."""
    copies = rng.choice([space.copies for space in plan_spaces(problem.within(problem.cluster))])
    size = problem.cluster.workers // copies
    count = rng.randint(1, min(size, len(problem.units)))
    ends = sorted(rng.sample(range(1, size + 1), count))
    cuts = [0, *sorted(rng.sample(range(1, len(problem.units)), count - 1)), len(problem.units)]
    stages = []
    for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        names = tuple(name for unit in problem.units[cuts[number] : cuts[number + 1]] for name in unit.layers)
        workers = tuple(copy * size + worker for worker in range(first, end) for copy in range(copies))
        depth = 1 + 2 * (count - number)
        stages.append(Stage(names, workers, depth, depth))
    return Plan(tuple(stages), copies, problem.options.inference)


def test_equal_servers_that_are_listed_cost_what_they_cost_unlisted() -> None:
    compared = 0
    for seed in range(60):
        _, problem = drawn(seed, random_instance)
        if len(problem.cluster.levels) < 2:
            continue
        problem = replace(problem, options=replace(problem.options, contention=True, stages=None))
        listed = problem.within(_listed(problem.cluster))
        assert not listed.cluster.uniform
        assert [(one.level, one.copies) for one in plan_spaces(listed)] == [
            (one.level, one.copies) for one in plan_spaces(problem)
        ]
        plan = _random_plan(random.Random(seed), problem)
        assert evaluate(plan, listed) == evaluate(plan, problem)
        links = Links.of(problem.cluster), Links.of(listed.cluster)
        mine, its = (card_loads(plan, one, link) for one, link in zip((problem, listed), links, strict=True))
        assert [times.tolist() for times in mine.busy_s] == [times.tolist() for times in its.busy_s]
        compared += 1
    assert compared > 15


def test_a_file_of_equal_servers_is_the_plain_cluster(tmp_path: Path) -> None:
    equal = MIXED.replace('device = "small"\ndevices = 2\nbandwidth = "6 GB/s"\ncard = "5 Gbit/s"', "")
    equal = equal.replace("[[server]]\n\nprice_per_hour = 1.5\n", "")
    cluster = load_cluster(_saved(tmp_path, equal))
    assert cluster.uniform
    plain = """
format = "pipeplan-cluster"
version = 1
name = "mixed"
price_per_hour = 10
device = {name = "big", kind = "cuda", memory = "16 GiB"}
[[level]]
name = "server"
count = 4
bandwidth = "12 GB/s"
[[level]]
name = "cluster"
count = 2
bandwidth = "10 Gbit/s"
latency = "50 us"
allreduce_efficiency = 0.5
"""
    other = load_cluster(_saved(tmp_path, plain))
    assert cluster == other
    assert cluster.digest() == other.digest()
    assert cluster.price_per_hour == 20


def test_slower_devices_and_links_never_make_a_plan_faster() -> None:
    for seed in range(12):
        _check_slower(seed)


def _check_slower(seed: int) -> None:
    _, problem = drawn(seed + 1000, random_instance)
    problem = replace(problem, options=replace(problem.options, contention=True, stages=None))
    machines = [Server(problem.cluster.device, Level("server", size, 50.0)) for size in (2, 1, 3)]
    cluster = Cluster.of_servers("t", machines, [Level("cluster", 3, 8.0, 0.1)])
    plan = _random_plan(random.Random(seed), problem.within(cluster))
    step_time = evaluate(plan, problem.within(cluster)).step_time_s
    for number, machine in enumerate(machines):
        device, inside = machine.device, machine.inside
        for worse in (
            replace(machine, device=replace(device, speed=device.speed / 2)),
            replace(machine, card=4.0),
            replace(machine, inside=replace(inside, bandwidth=inside.bandwidth / 2, latency_s=1.0)),
        ):
            changed = [*machines[:number], worse, *machines[number + 1 :]]
            slower = Cluster.of_servers("t", changed, cluster.levels[1:])
            assert evaluate(plan, problem.within(slower)).step_time_s >= step_time * (1 - 1e-12)


def test_copies_need_equal_components() -> None:
    problem = drawn(3, random_instance)[1]
    problem = replace(problem, options=replace(problem.options, stages=None, allow_copies=True))

    def spaces(cluster: Cluster) -> list[tuple[int, int, int]]:
        return [(space.level, space.first, space.copies) for space in plan_spaces(problem.within(cluster))]

    assert spaces(_servers(2, 2)) == [(2, 0, 1), (1, 0, 2)]
    assert spaces(_servers(2, 3)) == [(2, 0, 1)]
    assert spaces(_servers(2, 2, speeds=(1.0, 0.5))) == [(2, 0, 1)]
    assert spaces(_servers(2, 2, 2)) == [(2, 0, 1), (1, 0, 3), (1, 0, 2)]
    assert spaces(_servers(3, 2, 2, 2, 3)) == [(2, 0, 1), (1, 1, 3), (1, 1, 2)]
    # The second pair has faster cards than the first; the pair between them is as slow as the first.
    assert spaces(_servers(2, 2, 2, cards=(1.0, 9.0, 9.0))) == [(2, 0, 1), (1, 0, 3), (1, 0, 2), (1, 1, 2)]
    # What leads out of a server does not matter to a pipeline inside, but to one that spans two servers of a rack.
    assert (2, 0, 2) not in spaces(_servers(2, 2, 2, 2, cards=(1.0, 9.0, 2.0, 9.0), rack=2))
    assert (2, 0, 2) in spaces(_servers(2, 2, 2, 2, cards=(1.0, 9.0, 1.0, 9.0), rack=2))
    assert spaces(_servers(2, 3, 2, 3, rack=2)) == [(3, 0, 1), (2, 0, 2)]


def test_fewer_servers_are_the_first_ones(tmp_path: Path) -> None:
    cluster = load_cluster(_saved(tmp_path, MIXED))
    assert cluster.with_servers(2).server_sizes == (4, 4)
    assert cluster.with_servers(3) == cluster
    assert cluster.with_servers(1).workers == 4
    with pytest.raises(InputError, match="cannot have 4 servers: it lists 3, which differ"):
        cluster.with_servers(4)
    with pytest.raises(InputError, match="at least one"):
        cluster.with_servers(0)
    with pytest.raises(InputError, match="in steps of 2"):
        _servers(2, 3, 2, 3, rack=2).with_servers(3)


@pytest.mark.parametrize("text", [MIXED, MIXED.replace("price_per_hour = 1.5\n", "")])
def test_plan_json_holds_all_of_it(tmp_path: Path, text: str) -> None:
    cluster = load_cluster(_saved(tmp_path, text))
    assert (cluster.price_per_hour is None) is (text is not MIXED)
    again = cluster_from_json(Node(json.loads(json.dumps(cluster.to_json())), "plan.json: cluster"))
    assert again == cluster
    assert again.digest() == cluster.digest()
    priced = replace(load_cluster("A"), server_price=12.24)
    assert cluster_from_json(Node(priced.to_json(), "plan.json: cluster")) == priced


WRONG = (
    ('device = "small"', 'device = "smal"', "no device 'smal'; did you mean 'small'"),
    ('name = "small"\nkind = "cuda"', 'name = "small"\nkind = "cpu"', "server 2: its devices are cpu, .* 0 cuda"),
    ('name = "small"', 'name = "big"', "two devices called 'big'"),
    ('bandwidth = "6 GB/s"\n', "", r"server\[1\]: its 2 devices need a bandwidth"),
    ('card = "5 Gbit/s"', 'card = "0 Gbit/s"', "card: zero bandwidth"),
    ("count = 2", "count = 99999999", "at most 65536 servers"),
    ('name = "cluster"', 'name = "cluster"\ncount = 4', "its levels join 4 servers, but it has 3"),
    ('bandwidth = "10 Gbit/s"', "", "level cluster: zero bandwidth"),
    (MIXED[MIXED.index("[[level]]") :], "", r"3 servers and no \[\[level\]\] that joins them"),
)
"""What a file says, what it should say instead, and the complaint."""


def test_a_wrong_file_is_named_with_its_field(tmp_path: Path) -> None:
    for old, new, complaint in WRONG:
        assert old in MIXED
        with pytest.raises(InputError, match=complaint) as caught:
            load_cluster(_saved(tmp_path, MIXED.replace(old, new, 1)))
        assert "\n" not in str(caught.value)
        assert "mixed.toml" in str(caught.value)


def test_cards_of_all_servers_make_the_levels_bandwidth_needless(tmp_path: Path) -> None:
    text = MIXED.replace('bandwidth = "10 Gbit/s"\n', "").replace('12 GB/s"', '12 GB/s"\ncard = "20 Gbit/s"')
    links = Links.of(load_cluster(_saved(tmp_path, text)))
    assert links.sendrecv(2, 0)[0] == 5e9 / 8
    assert links.card(1, 0)[0] == 20e9 / 8
