"""Latency and bandwidth from times that follow the formulas, levels from what pairs reach, and clusters from both."""

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
from pipeplan.errors import InputError
from pipeplan.link_fit.alpha_beta import LinkSeries, TransferTime, fit_alpha_beta
from pipeplan.link_fit.find_levels import GAP, Nesting, find_levels
from pipeplan.link_fit.to_cluster import ClusterFromLinks, build_cluster
from pipeplan_measure import pair_schedule

SIZES = [4096 * 4**step for step in range(8)]
Rate = Callable[[int, int], float]
Partition = tuple[tuple[int, ...], ...]


def ring_s(members: int, size: float, bandwidth: float, latency_s: float) -> float:
    """Every member sends a chunk of 1/members in each of 2 (members - 1) steps."""
    return 2 * (members - 1) * (size / members / bandwidth + latency_s)


def test_times_without_noise_give_back_what_made_them() -> None:
    """Rings of several sizes are one link."""
    for bandwidth, latency_s in ((4e6, 2e-3), (1.25e9, 3e-5), (2e11, 5e-6)):
        messages = [TransferTime.message(size, latency_s + size / bandwidth) for size in SIZES]
        rings = [
            TransferTime.ring(count, size, ring_s(count, size, bandwidth, latency_s))
            for count in (2, 4, 7)
            for size in SIZES
        ]
        for points in (messages, rings):
            found = fit_alpha_beta(points)
            assert found.bandwidth == pytest.approx(bandwidth, rel=1e-4)
            assert found.latency_s == pytest.approx(latency_s, rel=1e-3)
            assert found.worst < 1e-3
        expected = ring_s(5, 10**7, bandwidth, latency_s)
        assert found.seconds(TransferTime.ring(5, 10**7, 0.0)) == pytest.approx(expected, rel=1e-3)


def test_noise_and_one_disturbed_size_move_the_bandwidth_by_little() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        points = [TransferTime.message(size, (3e-5 + size / 1e9) * np.exp(rng.normal(0, 0.05))) for size in SIZES * 3]
        found = fit_alpha_beta(points)
        assert found.bandwidth == pytest.approx(1e9, rel=0.05)
        assert found.latency_s == pytest.approx(3e-5, rel=0.15)
        assert 0.01 < found.error < 0.1
    for size in (4096, 2**20, 4 * 2**20):
        points = [TransferTime.message(one, (3e-5 + one / 1e9) * (4 if one == size else 1)) for one in SIZES]
        found = fit_alpha_beta(points)
        assert found.bandwidth == pytest.approx(1e9, rel=0.08)
        assert found.worst == pytest.approx(0.75, abs=0.05), "and it is stated"


def test_no_latency_to_see_and_times_that_no_link_has() -> None:
    found = fit_alpha_beta([TransferTime.message(size, size / 1e6) for size in SIZES])
    assert found.bandwidth == pytest.approx(1e6, rel=1e-3)
    assert found.latency_s < 1e-4 * SIZES[0] / 1e6 * 20
    with np.errstate(all="raise", under="ignore"):
        assert fit_alpha_beta([TransferTime.message(size, 1e-306) for size in SIZES]).bandwidth > 1e300


def pairs(workers: int, rate: Rate, seed: int = 0, noise: float = 0.05) -> dict[tuple[int, int], float]:
    rng = np.random.default_rng(seed)
    everyone = itertools.combinations(range(workers), 2)
    return {(a, b): rate(a, b) * np.exp(np.clip(rng.normal(0, noise), -2 * noise, 2 * noise)) for a, b in everyone}


def tree(spans: Sequence[int], rates: Sequence[float]) -> Rate:
    """The rate of the smallest component that holds both; `spans` are workers in a component of each level."""
    return lambda a, b: next(rate for span, rate in zip(spans, rates, strict=True) if a // span == b // span)


def runs(workers: int, span: int) -> Partition:
    return tuple(tuple(range(start, start + span)) for start in range(0, workers, span))


TREES: tuple[tuple[tuple[int, ...], tuple[float, ...], int, tuple[str, ...]], ...] = (
    ((4, 8), (12.0, 1.0), 4, ("server", "cluster")),
    ((2, 4, 8), (100.0, 12.0, 1.0), 4, ("island", "server", "cluster")),
    ((2, 4, 8), (4.0, 2.0, 0.6), 1, ("server", "group 1", "group 2", "cluster")),
    ((2, 6, 12), (9.0, 4.0, 1.0), 2, ("server", "group", "cluster")),
    ((4,), (3.0,), 4, ("server",)),
    ((2, 4), (50.0, 12.0), 4, ("island", "server")),
    ((3, 9), (2.0, 2.0), 3, ("server", "cluster")),  # without a gap between the two
)
"""Workers in a component of each level, rates, workers of a server, and the levels' names."""


def test_trees_are_found() -> None:
    for (spans, rates, server, names), seed in itertools.product(TREES, range(3)):
        workers = spans[-1]
        found = find_levels(pairs(workers, tree(spans, rates), seed), [rank // server for rank in range(workers)])
        assert found.partitions == tuple(runs(workers, span) for span in sorted({server, *spans}))
        assert (found.names, found.names[found.server], found.notes) == (names, "server", ())
    for factor, levels in ((GAP * 0.9, 1), (GAP * 1.1, 2)):
        found = find_levels(pairs(8, tree((4, 8), (factor, 1.0)), noise=0.0), [0] * 8)
        assert len(found.partitions) == levels
    # Few pairs are enough if they connect all.
    every = pairs(32, tree((8, 32), (12.0, 1.0)))
    some = {(a, b): rate for (a, b), rate in every.items() if b - a in (1, 2, 4) or a % 8 == b % 8 == 0}
    assert find_levels(some, [rank // 8 for rank in range(32)]).partitions == (runs(32, 8), runs(32, 32))


ODD: tuple[tuple[list[int], Rate, tuple[Partition, ...], str], ...] = (
    # A fast and a slow server; servers of unequal size.
    ([0] * 4 + [1] * 4, lambda a, b: 1.0 if a // 4 != b // 4 else 12.0 if a < 4 else 5.0, (runs(8, 4), runs(8, 8)), ""),
    ([0, 0, 0, 1], lambda a, b: 12.0 if b < 3 else 1.0, (((0, 1, 2), (3,)), ((0, 1, 2, 3),)), ""),
    (
        [0, 0, 1, 1, 2, 2, 3, 3],
        lambda a, b: 12.0 if a // 2 == b // 2 else 4.0 if b < 6 else 1.0,
        (runs(8, 2), runs(8, 8)),
        "0-5 | 6,7 are near each other",
    ),
    (
        [0] * 4 + [1] * 4,  # with islands in the first server alone
        lambda a, b: 1.0 if a // 4 != b // 4 else 50.0 if b < 4 and a // 2 == b // 2 else 12.0,
        (runs(8, 4), runs(8, 8)),
        "cannot state for servers that differ",
    ),
    ([0, 0, 1, 1], lambda a, b: 10.0 if (a, b) == (1, 2) else 1.0, (runs(4, 2), runs(4, 4)), "across the edges of ser"),
)
"""The server of each worker, rates, the components, and what is said of those that are left out."""


def test_what_is_no_tree() -> None:
    for servers, rate, partitions, note in ODD:
        found = find_levels(pairs(len(servers), rate), servers)
        assert (found.partitions, len(found.notes)) == (partitions, int(note != ""))
        assert note in "".join(found.notes)
    rates = pairs(4, tree((2, 4), (9.0, 1.0)))
    assert find_levels(rates, [0] * 4, islands=False).partitions == (runs(4, 4),), "they share cores"
    assert find_levels(rates, [0] * 4).partitions == (runs(4, 2), runs(4, 4))
    with pytest.raises(InputError, match=r"of one server .* 0,2 \| 1,3: start them in the order 0,2,1,3"):
        find_levels(pairs(4, lambda a, b: 1.0), [0, 1, 0, 1])
    islands = pairs(4, lambda a, b: 50.0 if a % 2 == b % 2 else 12.0)
    with pytest.raises(InputError, match=r"near each other .* set CUDA_VISIBLE_DEVICES=0,2,1,3"):
        find_levels(islands, [0] * 4)


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
