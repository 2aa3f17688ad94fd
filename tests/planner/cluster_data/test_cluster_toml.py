"""Cluster files: read, refused and written, and the links that they give."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.cluster_data.cluster import MEMORY_RESERVE, Cluster, Device, Level, Server
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.cluster_data.cluster_toml import (
    bundled_cluster_names,
    cluster_toml,
    load_cluster,
    read_cluster,
    write_cluster,
)
from pipeplan.cluster_data.links import Links
from pipeplan.cluster_data.local import local_cluster
from pipeplan.errors import InputError
from pipeplan.util.files import Node

GOOD = """
format = "pipeplan-cluster"
version = 1
name = "mine"
[device]
name = "A100"
kind = "cuda"
memory = "40 GiB"
[[level]]
name = "server"
count = 2
bandwidth = "100 GB/s"
[[level]]
name = "cluster"
count = 3
bandwidth = "10 Gbit/s"
latency = "20 us"
allreduce_efficiency = 0.5
"""


def three_levels() -> Cluster:
    levels = (Level("board", 2, 100.0), Level("server", 3, 10.0, 1.0), Level("cluster", 2, 50.0))
    return Cluster("three", Device("d", "cpu", 1), levels)


def test_the_papers_clusters_are_bundled() -> None:
    assert bundled_cluster_names() == ["A", "B", "C"]
    for name, sizes, gbits in (("A", (4, 4), 10), ("B", (2, 8), 25), ("C", (4, 1), 40)):
        found = load_cluster(name)
        assert (found.servers, found.workers_per_server) == sizes
        assert found.levels[-1].bandwidth * 8 / 1e9 == gbits
        assert all(level.source for level in found.levels if level.count > 1)


RATE, LATENCY, MEMORY, SHARE = (
    'bandwidth = "10 Gbit/s"',
    'latency = "20 us"',
    'memory = "40 GiB"',
    "allreduce_efficiency = 0.5",
)
WRONG = (
    (RATE, "", "level cluster: zero bandwidth"),
    (RATE, 'bandwidth = "1e-300 B/s"', "is out of range"),
    (LATENCY, 'latency = "1e9 s"', "is out of range"),
    (LATENCY, "latency = 2e-5", 'latency: 2e-05 has no unit: write it as in "50 us"'),
    ("count = 3", "count = 0", "no devices"),
    ("count = 3", "count = 99999999", "at most"),
    (MEMORY, 'memory = "0 B"', "no memory"),
    (MEMORY, "memory = 40", "a memory of 40 bytes; is a unit missing, as in '16 GiB'"),
    (MEMORY, f'{MEMORY}\nmemory_reserve = "51%"', "a memory_reserve of 51% leaves too little"),
    (MEMORY, f'{MEMORY}\nmemory_reserve = "5 GiB"', "memory_reserve: expected a share such as '5%' or 0.05"),
    ("latency", "latancy", "no field 'latancy'; did you mean 'latency'"),
    (SHARE, "allreduce_efficiency = 1.5", "must be 1e-06 to 1"),
    (SHARE, "allreduce_efficiency = 0", "must be 1e-06 to 1"),
    ('format = "pipeplan-cluster"', "", "not a cluster file"),
    ("[device]", "[device", "not valid TOML"),
)
"""What a file says, what it should say instead, and the complaint."""


def test_the_numbers_of_servers_and_workers_can_be_changed() -> None:
    assert load_cluster("A").with_servers(2).workers == 8
    assert three_levels().with_servers(5).workers == 30
    assert local_cluster(2).with_servers(1) == local_cluster(2)
    whole = local_cluster(4)
    fewer = whole.with_workers(3)
    assert (fewer.workers, fewer.servers, fewer.device) == (3, 1, whole.device)
    for change, said in (
        (lambda: load_cluster("A").with_servers(0), "at least one"),
        (lambda: local_cluster(2).with_servers(3), "its only level is the server"),
        (lambda: whole.with_workers(0), "has 4 workers, not 0"),
        (lambda: whole.with_workers(5), "has 4 workers, not 5"),
        (lambda: load_cluster("A").with_workers(2), "for others give --servers"),
    ):
        with pytest.raises(InputError, match=said):
            change()


def test_this_machine_shares_its_cores_and_memory() -> None:
    one, many = local_cluster(1), local_cluster(64)
    assert one.workers == 1
    assert many.workers == 64
    if one.device.kind == many.device.kind == "cpu":
        assert many.device.memory_bytes <= one.device.memory_bytes // 64 + 1
        assert many.device.speed == one.device.speed == 1
        assert many.shared_cores == [(0, 64, many.device.cores)]
        assert not one.shared_cores
    with pytest.raises(InputError, match="at least 1"):
        local_cluster(0)


NAMES = ['a "quoted" one', "back\\slash", "tab\tand\nline", "del\x7f", "Zürich µ 服", "#no = comment", ""]


def level(rng: random.Random, name: str, most: int = 5) -> Level:
    rates = [1.25e9, 3.3333333e6, 12e9, rng.uniform(1, 1e12), float(rng.randrange(1, 10**12)), 1.0]
    times = [0.0, 5e-6, 1e-3, rng.uniform(0, 1), rng.uniform(0, 1e-4), 123e-9, 2.0]
    shares = [1.0, 0.7, rng.uniform(0.001, 1)]
    return Level(
        name, rng.randint(2, most), rng.choice(rates), rng.choice(times), rng.choice(shares), rng.choice(shares),
        rng.choice(NAMES),
    )  # fmt: skip


def device(rng: random.Random, name: str) -> Device:
    memory = rng.choice([16 * 2**30, 10**9, rng.randrange(1, 2**40), 2**20 + 1])
    speed, cores, reserve = rng.choice([1.0, 0.5, 2 / 3]), rng.choice([0, 2]), rng.choice([0.0, 0.05, 1 / 3])
    return Device(name, "cpu", memory, speed, cores, reserve)


def uniform(rng: random.Random) -> Cluster:
    levels = tuple(level(rng, rng.choice(NAMES)) for _ in range(rng.randint(1, 4)))
    price = rng.choice([None, 3.06, 0.1 + 0.2])
    return Cluster(rng.choice(NAMES), device(rng, rng.choice(NAMES)), levels, server_price=price)


def listed(rng: random.Random) -> Cluster:
    devices = [device(rng, name) for name in rng.sample(NAMES, 3)]
    machines = [
        Server(rng.choice(devices), replace(level(rng, "server"), count=rng.randint(1, 3)), rng.choice([0.0, 1.25e8]))
        for _ in range(4)
    ]
    machines[0] = replace(machines[0], inside=replace(machines[0].inside, count=4))
    machines[1] = replace(machines[1], price_per_hour=1.5)
    return Cluster.of_servers("mixed", machines, [replace(level(rng, "all"), count=4)])


def test_clusters_read_back(tmp_path: Path) -> None:
    """Bundled ones, and random ones with awkward names and figures."""
    bundled = map(load_cluster, bundled_cluster_names())
    drawn = [make(random.Random(seed)) for make in (uniform, listed) for seed in range(30)]
    path = tmp_path / "written.toml"
    for written in (*bundled, *drawn):
        write_cluster(written, path, ["two lines\nof remarks", "and another"])
        assert read_cluster(path) == written
    levels = (Level("server", 4, 12e9), Level("cluster", 2, 1.25e9, 50e-6, 0.6))
    text = cluster_toml(Cluster("lab", Device("V100", "cuda", 16 * 2**30), levels))
    for line in ('memory = "16 GiB"', 'bandwidth = "96 Gbit/s"', 'bandwidth = "10 Gbit/s"', 'latency = "50 us"'):
        assert line in text.splitlines(), "figures are written as people write them"
    machines = [Server(Device("one", "cpu", memory), Level("server", 2, 1e9)) for memory in (1, 2)]
    with pytest.raises(InputError, match="both called 'one'"):
        cluster_toml(Cluster.of_servers("mixed", machines, [Level("all", 2, 1e8)]))


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
    sizes = [Server(Device("d", "cpu", 1000), Level("server", size, 100.0)) for size in (2, 3, 2, 3)]
    above = [Level("rack", 2, 10.0), Level("cluster", 2, 5.0)]
    with pytest.raises(InputError, match="in steps of 2"):
        Cluster.of_servers("t", sizes, above).with_servers(3)


def test_efficiencies_and_single_devices_count_as_elsewhere_and_cards_make_bandwidths_needless(tmp_path: Path) -> None:
    links = Links.of(load_cluster(_saved(tmp_path, MIXED.replace("devices = 2", "devices = 1"))))
    assert links.allreduce(2, 0) == (5e9 / 8 * 0.5, 50e-6)
    assert links.sendrecv(2, 0) == (5e9 / 8, 50e-6)
    assert links.sendrecv(1, 8) == (float("inf"), 0.0)
    text = MIXED.replace('bandwidth = "10 Gbit/s"\n', "").replace('12 GB/s"', '12 GB/s"\ncard = "20 Gbit/s"')
    links = Links.of(load_cluster(_saved(tmp_path, text)))
    assert (links.sendrecv(2, 0)[0], links.card(1, 0)[0]) == (5e9 / 8, 20e9 / 8)


def test_a_file_of_equal_servers_is_the_plain_cluster(tmp_path: Path) -> None:
    equal = MIXED.replace('device = "small"\ndevices = 2\nbandwidth = "6 GB/s"\ncard = "5 Gbit/s"', "")
    equal = equal.replace("[[server]]\n\nprice_per_hour = 1.5\n", "")
    levels = (Level("server", 4, 12e9), Level("cluster", 2, 1.25e9, 50e-6, 0.5))
    big = Device("big", "cuda", 16 * 2**30, memory_reserve=MEMORY_RESERVE)
    plain = Cluster("mixed", big, levels, server_price=10)
    cluster = load_cluster(_saved(tmp_path, equal))
    assert (cluster, cluster.digest(), cluster.uniform) == (plain, plain.digest(), True)
    assert cluster.price_per_hour == 20


def test_plan_json_holds_all_of_it(tmp_path: Path) -> None:
    mixed, unpriced = (
        load_cluster(_saved(tmp_path, text)) for text in (MIXED, MIXED.replace("price_per_hour = 1.5\n", ""))
    )
    assert unpriced.price_per_hour is None
    for made in (mixed, unpriced, replace(load_cluster("A"), server_price=12.24)):
        again = cluster_from_json(Node(json.loads(json.dumps(made.to_json())), "plan.json: cluster"))
        assert (again, again.digest()) == (made, made.digest())


WRONG_SERVERS = (
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
    path = tmp_path / "mine.toml"
    for text, old, new, complaint in (*((GOOD, *row) for row in WRONG), *((MIXED, *row) for row in WRONG_SERVERS)):
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(InputError, match=complaint) as caught:
            load_cluster(str(path))
        assert "\n" not in str(caught.value)
        assert "mine" in str(caught.value)
    with pytest.raises(InputError, match=r"no cluster file nowhere\.toml"):
        load_cluster("nowhere.toml")
