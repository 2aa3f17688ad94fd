"""Clusters from times: those that a known network gives, for every pair and group that the survey would measure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster, Device
from pipeplan.cluster_data.links import Links
from pipeplan.link_fit.alpha_beta import LinkSeries
from pipeplan.link_fit.find_levels import Nesting, find_levels
from pipeplan.link_fit.to_cluster import ClusterFromLinks, build_cluster
from pipeplan_measure import pair_schedule

SIZES = [4096 * 4**step for step in range(7)]
CPU = Device("core", "cpu", 2**30)


@dataclass(frozen=True)
class Network:
    """What is true. Levels are given from the inside; a place is a server."""

    spans: tuple[int, ...]
    """Workers in a component of each level."""
    cards: tuple[float, ...]
    """Bytes/s of one component's link to the others of its level."""
    latencies: tuple[float, ...]
    stream: float = float("inf")
    """The most that one pair reaches."""
    ring: float = 1.0
    """Share of the slowest link that an all-reduce reaches."""

    def level(self, a: int, b: int) -> int:
        return next(number for number, span in enumerate(self.spans) if a // span == b // span)

    def rate(self, a: int, b: int) -> float:
        return min(self.stream, *self.cards[: self.level(a, b) + 1])


def times(network: Network, nesting: Nesting, seed: int, slow: Callable[[Sequence[int]], float]) -> list[LinkSeries]:
    """Of every job of the survey, by the closed forms. `slow`: how much slower some workers are."""
    rng, found = np.random.default_rng(seed), []
    for job in pair_schedule.level_jobs(nesting.partitions, ["machine"] * network.spans[-1]):
        for ranks in job.teams:
            level = network.level(min(ranks), max(ranks))
            latency, rate = max(network.latencies[: level + 1]), network.rate(min(ranks), max(ranks)) / slow(ranks)
            if job.kind == pair_schedule.ALL_PAIRS_AT_ONCE and network.spans[level - 1] > 1 and level:
                rate = min(network.stream, network.cards[level] / slow(ranks) / len(job.teams))
            if job.kind == pair_schedule.RING:
                rate = min(network.cards[: level + 1]) / slow(ranks) * network.ring
                count = 2 * (len(ranks) - 1)
                each = [count * (size / len(ranks) / rate + latency) for size in SIZES]
            else:
                each = [size / rate + latency for size in SIZES]
            noisy = [one * np.exp(rng.normal(0, 0.02)) for one in each]
            found.append(LinkSeries(job.kind, job.level, ranks, "Gloo", tuple(zip(SIZES, noisy, strict=True))))
    return found


def surveyed(
    network: Network,
    server: int,
    devices: Sequence[Device] | None = None,
    slow: Callable[[Sequence[int]], float] = lambda ranks: 1.0,
    seed: int = 0,
) -> ClusterFromLinks:
    workers = network.spans[-1]
    rates = {(a, b): network.rate(a, b) / slow((a, b)) for a, b in itertools.combinations(range(workers), 2)}
    nesting = find_levels(rates, [rank // server for rank in range(workers)])
    return build_cluster("net", nesting, times(network, nesting, seed, slow), devices or [CPU] * workers, "today")


def read_back(built: ClusterFromLinks, folder: Path) -> Cluster:
    cluster_toml.write_cluster(built.cluster, folder / "net.toml")
    found = cluster_toml.read_cluster(folder / "net.toml")
    assert found == built.cluster
    return found


def test_the_rates_of_a_network_of_three_levels(tmp_path: Path) -> None:
    network = Network((2, 4, 8), (50e9, 12e9, 1.25e9), (5e-6, 10e-6, 40e-6), ring=0.8)
    for seed in range(3):
        cluster = read_back(surveyed(network, 4, seed=seed), tmp_path)
        assert [(one.name, one.count) for one in cluster.levels] == [("island", 2), ("server", 2), ("cluster", 2)]
        assert (cluster.workers_per_server, cluster.servers) == (4, 2)
        links = Links.of(cluster)
        for number, card in enumerate(network.cards, 1):
            assert links.sendrecv(number, 0)[0] == pytest.approx(card, rel=0.06)
            assert links.allreduce(number, 0)[0] == pytest.approx(card * 0.8, rel=0.06)
            assert links.sendrecv(number, 0)[1] == pytest.approx(network.latencies[number - 1], rel=0.2)
            assert "measured today" in cluster.levels[number - 1].source


def test_one_pair_may_not_fill_a_card_and_reductions_may_be_faster_than_messages(tmp_path: Path) -> None:
    network = Network((4, 8), (40e9, 10e9), (5e-6, 20e-6), stream=4e9, ring=0.6)
    above = read_back(surveyed(network, 4), tmp_path).levels[1]
    assert above.bandwidth == pytest.approx(10e9, rel=0.05), "what all workers of a server reach together"
    assert (above.sendrecv_efficiency, above.allreduce_efficiency) == pytest.approx((0.4, 0.6), rel=0.05)
    level = read_back(surveyed(Network((4,), (2e9,), (5e-6,), ring=20.0), 4), tmp_path).levels[0]
    assert level.allreduce_efficiency == pytest.approx(1.0, abs=0.01)
    assert level.bandwidth * level.sendrecv_efficiency == pytest.approx(2e9, rel=0.05)


def test_servers_whose_cards_differ_are_listed(tmp_path: Path) -> None:
    network = Network((2, 8), (10e9, 1e9), (5e-6, 20e-6), ring=0.9)

    def slow(ranks: Sequence[int]) -> float:
        return 4.0 if min(ranks) // 2 != max(ranks) // 2 and max(ranks) >= 4 else 1.0

    cluster = read_back(surveyed(network, 2, slow=slow), tmp_path)
    assert [machine.card for machine in cluster.machines] == pytest.approx([1e9, 1e9, 2.5e8, 2.5e8], rel=0.06)
    links = Links.of(cluster)
    assert links.allreduce(2, 0)[0] == pytest.approx(2.5e8 * 0.9, rel=0.06)
    assert links.sendrecv(1, 7)[0] == pytest.approx(10e9, rel=0.06)
    alike = read_back(surveyed(network, 2, slow=lambda ranks: 1.2 if max(ranks) > 5 else 1.0), tmp_path)
    assert (alike.uniform, alike.server_sizes) == (True, (2, 2, 2, 2))


def test_servers_whose_insides_and_devices_differ_and_one_with_two_devices(tmp_path: Path) -> None:
    network = Network((4, 8), (12e9, 1e9), (5e-6, 20e-6))
    devices = [CPU] * 4 + [Device("core", "cpu", 2**29)] * 4
    cluster = read_back(surveyed(network, 4, devices, lambda ranks: 3.0 if min(ranks) >= 4 else 1.0), tmp_path)
    assert [(one.device.name, one.device.memory_bytes) for one in cluster.machines] == [
        ("core #1", 2**30),
        ("core #2", 2**29),
    ]
    assert [one.inside.bandwidth for one in cluster.machines] == pytest.approx([12e9, 4e9], rel=0.06)
    devices = [CPU, Device("half a core", "cpu", 2**29, speed=0.5)]
    cluster = read_back(surveyed(Network((2,), (4e8,), (1e-4,)), 2, devices), tmp_path)
    assert (cluster.servers, cluster.devices) == (1, tuple(devices))
    assert cluster.levels[1].bandwidth == pytest.approx(4e8, rel=0.06)
