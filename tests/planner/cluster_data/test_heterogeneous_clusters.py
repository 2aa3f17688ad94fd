"""Clusters whose servers differ: what a file says of them, and what plans on them cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from instances import drawn, random_instance

from pipeplan.cluster_data.cluster import MEMORY_RESERVE, Cluster, Device, Level, Server
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.cluster_data.cluster_toml import load_cluster
from pipeplan.cluster_data.links import Links
from pipeplan.errors import InputError
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


def test_a_file_lists_what_differs(tmp_path: Path) -> None:
    cluster = load_cluster(_saved(tmp_path, MIXED))
    assert not cluster.uniform
    assert (cluster.workers, cluster.servers, cluster.server_sizes) == (10, 3, (4, 4, 2))
    assert [device.name for device in cluster.devices] == ["big"] * 8 + ["small"] * 2
    assert cluster.device_of(9).memory_bytes == 8 * 2**30
    assert (cluster.speed_of([0, 7]), cluster.speed_of([7, 8])) == (1.0, 0.5)
    assert cluster.memory_of([7, 8]) == int(8 * 2**30 * (1 - MEMORY_RESERVE))
    assert (cluster.total_speed, cluster.price_per_hour, cluster.levels[-1].count) == (9.0, 21.5, 3)
    assert [cluster.with_servers(count).server_sizes for count in (1, 2, 3)] == [(4,), (4, 4), (4, 4, 2)]
    for count, said in ((4, "cannot have 4 servers: it lists 3, which differ"), (0, "at least one")):
        with pytest.raises(InputError, match=said):
            cluster.with_servers(count)
    with pytest.raises(InputError, match="in steps of 2"):
        _servers(2, 3, 2, 3, rack=2).with_servers(3)


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


def test_efficiencies_and_single_devices_count_as_elsewhere_and_cards_make_bandwidths_needless(tmp_path: Path) -> None:
    links = Links.of(load_cluster(_saved(tmp_path, MIXED.replace("devices = 2", "devices = 1"))))
    assert links.allreduce(2, 0) == (5e9 / 8 * 0.5, 50e-6)
    assert links.sendrecv(2, 0) == (5e9 / 8, 50e-6)
    assert links.sendrecv(1, 8) == (float("inf"), 0.0)
    text = MIXED.replace('bandwidth = "10 Gbit/s"\n', "").replace('12 GB/s"', '12 GB/s"\ncard = "20 Gbit/s"')
    links = Links.of(load_cluster(_saved(tmp_path, text)))
    assert (links.sendrecv(2, 0)[0], links.card(1, 0)[0]) == (5e9 / 8, 20e9 / 8)


PLAIN = """
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


def test_a_file_of_equal_servers_is_the_plain_cluster(tmp_path: Path) -> None:
    equal = MIXED.replace('device = "small"\ndevices = 2\nbandwidth = "6 GB/s"\ncard = "5 Gbit/s"', "")
    equal = equal.replace("[[server]]\n\nprice_per_hour = 1.5\n", "")
    cluster, other = (load_cluster(_saved(tmp_path, text)) for text in (equal, PLAIN))
    assert (cluster, cluster.digest(), cluster.uniform) == (other, other.digest(), True)
    assert cluster.price_per_hour == 20


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


def test_plan_json_holds_all_of_it(tmp_path: Path) -> None:
    mixed, unpriced = (
        load_cluster(_saved(tmp_path, text)) for text in (MIXED, MIXED.replace("price_per_hour = 1.5\n", ""))
    )
    assert unpriced.price_per_hour is None
    for cluster in (mixed, unpriced, replace(load_cluster("A"), server_price=12.24)):
        again = cluster_from_json(Node(json.loads(json.dumps(cluster.to_json())), "plan.json: cluster"))
        assert (again, again.digest()) == (cluster, cluster.digest())


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
