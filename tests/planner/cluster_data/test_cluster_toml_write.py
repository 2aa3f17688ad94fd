"""Clusters that are written and read back: bundled ones, and random ones with awkward names and figures."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.errors import InputError

NAMES = ['a "quoted" one', "back\\slash", "tab\tand\nline", "del\x7f", "Zürich µ 服", "#no = comment", ""]


def back(cluster: Cluster, folder: Path) -> Cluster:
    path = folder / "written.toml"
    cluster_toml.write_cluster(cluster, path, ["two lines\nof remarks", "and another"])
    return cluster_toml.read_cluster(path)


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


@pytest.mark.parametrize("name", cluster_toml.bundled_cluster_names())
def test_bundled_clusters_read_back(name: str, tmp_path: Path) -> None:
    cluster = cluster_toml.load_cluster(name)
    assert back(cluster, tmp_path) == cluster


@pytest.mark.parametrize("seed", range(30))
def test_random_clusters_read_back(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    levels = tuple(level(rng, rng.choice(NAMES)) for _ in range(rng.randint(1, 4)))
    price = rng.choice([None, 3.06, 0.1 + 0.2])
    cluster = Cluster(rng.choice(NAMES), device(rng, rng.choice(NAMES)), levels, server_price=price)
    assert back(cluster, tmp_path) == cluster


@pytest.mark.parametrize("seed", range(30))
def test_random_servers_that_differ_read_back(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    devices = [device(rng, name) for name in rng.sample(NAMES, 3)]
    machines = [
        Server(rng.choice(devices), replace(level(rng, "server"), count=rng.randint(1, 3)), rng.choice([0.0, 1.25e8]))
        for _ in range(4)
    ]
    machines[0] = replace(machines[0], inside=replace(machines[0].inside, count=4))
    machines[1] = replace(machines[1], price_per_hour=1.5)
    cluster = Cluster.of_servers("mixed", machines, [replace(level(rng, "all"), count=4)])
    assert back(cluster, tmp_path) == cluster


def test_figures_are_written_as_people_write_them() -> None:
    levels = (Level("server", 4, 12e9), Level("cluster", 2, 1.25e9, 50e-6, 0.6))
    text = cluster_toml.cluster_toml(Cluster("lab", Device("V100", "cuda", 16 * 2**30), levels))
    for line in ('memory = "16 GiB"', 'bandwidth = "96 Gbit/s"', 'bandwidth = "10 Gbit/s"', 'latency = "50 us"'):
        assert line in text.splitlines()


def test_two_devices_of_one_name_are_refused() -> None:
    machines = [Server(Device("one", "cpu", memory), Level("server", 2, 1e9)) for memory in (1, 2)]
    with pytest.raises(InputError, match="both called 'one'"):
        cluster_toml.cluster_toml(Cluster.of_servers("mixed", machines, [Level("all", 2, 1e8)]))
