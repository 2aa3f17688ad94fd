"""Latency and bandwidth from times that follow the formulas, and levels from what pairs reach."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pipeplan.errors import InputError
from pipeplan.link_fit.alpha_beta import TransferTime, fit_alpha_beta
from pipeplan.link_fit.find_levels import GAP, find_levels

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
