"""Levels from what pairs reach: trees that are known, with noise, and what is no tree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pipeplan.errors import InputError
from pipeplan.link_fit.find_levels import GAP, find_levels

Rate = Callable[[int, int], float]


def pairs(workers: int, rate: Rate, seed: int = 0, noise: float = 0.05) -> dict[tuple[int, int], float]:
    rng = np.random.default_rng(seed)
    everyone = itertools.combinations(range(workers), 2)
    return {(a, b): rate(a, b) * np.exp(np.clip(rng.normal(0, noise), -2 * noise, 2 * noise)) for a, b in everyone}


def tree(spans: Sequence[int], rates: Sequence[float]) -> Rate:
    """The rate of the smallest component that holds both; `spans` are workers in a component of each level."""
    return lambda a, b: next(rate for span, rate in zip(spans, rates, strict=True) if a // span == b // span)


def runs(workers: int, span: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(start, start + span)) for start in range(0, workers, span))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("spans", "rates", "server", "names"),
    [
        ((4, 8), (12.0, 1.0), 4, ("server", "cluster")),
        ((2, 4, 8), (100.0, 12.0, 1.0), 4, ("island", "server", "cluster")),
        ((2, 4, 8), (4.0, 2.0, 0.6), 1, ("server", "group 1", "group 2", "cluster")),
        ((2, 6, 12), (9.0, 4.0, 1.0), 2, ("server", "group", "cluster")),
        ((4,), (3.0,), 4, ("server",)),
        ((2, 4), (50.0, 12.0), 4, ("island", "server")),
        ((3, 9), (2.0, 2.0), 3, ("server", "cluster")),
    ],
    ids=["4x2", "islands", "singles", "groups", "alone", "islands-alone", "no-gap"],
)
def test_trees_are_found(
    spans: tuple[int, ...], rates: tuple[float, ...], server: int, names: tuple[str, ...], seed: int
) -> None:
    workers = spans[-1]
    found = find_levels(pairs(workers, tree(spans, rates), seed), [rank // server for rank in range(workers)])
    expected = {server, *spans} if server not in spans else set(spans)
    assert found.partitions == tuple(runs(workers, span) for span in sorted(expected))
    assert found.names == names
    assert found.names[found.server] == "server"
    assert found.notes == ()


def test_a_step_below_the_gap_is_no_level() -> None:
    for factor, levels in ((GAP * 0.9, 1), (GAP * 1.1, 2)):
        found = find_levels(pairs(8, tree((4, 8), (factor, 1.0)), noise=0.0), [0] * 8)
        assert len(found.partitions) == levels


def test_a_fast_and_a_slow_server_are_two_servers_and_no_level() -> None:
    def rate(a: int, b: int) -> float:
        return 1.0 if a // 4 != b // 4 else 12.0 if a < 4 else 5.0

    found = find_levels(pairs(8, rate), [rank // 4 for rank in range(8)])
    assert found.partitions == (runs(8, 4), runs(8, 8))


def test_servers_of_unequal_size() -> None:
    found = find_levels(pairs(4, lambda a, b: 12.0 if b < 3 else 1.0), [0, 0, 0, 1])
    assert found.partitions == (((0, 1, 2), (3,)), ((0, 1, 2, 3),))


def test_unequal_groups_of_servers_are_left_out_and_said() -> None:
    def rate(a: int, b: int) -> float:
        return 12.0 if a // 2 == b // 2 else 4.0 if b < 6 else 1.0

    found = find_levels(pairs(8, rate), [rank // 2 for rank in range(8)])
    assert found.partitions == (runs(8, 2), runs(8, 8))
    assert found.notes[0].startswith("0-5 | 6,7 are near each other")


def test_what_is_near_across_servers_is_left_out_and_said() -> None:
    rates = pairs(4, lambda a, b: 10.0 if (a, b) == (1, 2) else 1.0)
    found = find_levels(rates, [0, 0, 1, 1])
    assert found.partitions == (runs(4, 2), runs(4, 4))
    assert "across the edges of servers" in found.notes[0]


def test_workers_that_share_cores_have_no_islands() -> None:
    rates = pairs(4, tree((2, 4), (9.0, 1.0)))
    assert find_levels(rates, [0] * 4, islands=False).partitions == (runs(4, 4),)
    assert find_levels(rates, [0] * 4).partitions == (runs(4, 2), runs(4, 4))


def test_components_must_be_runs_of_ranks() -> None:
    with pytest.raises(InputError, match=r"of one server .* 0,2 \| 1,3: start them in the order 0,2,1,3"):
        find_levels(pairs(4, lambda a, b: 1.0), [0, 1, 0, 1])
    islands = pairs(4, lambda a, b: 50.0 if a % 2 == b % 2 else 12.0)
    with pytest.raises(InputError, match=r"near each other .* set CUDA_VISIBLE_DEVICES=0,2,1,3"):
        find_levels(islands, [0] * 4)


def test_few_pairs_are_enough_if_they_connect_all() -> None:
    every = pairs(32, tree((8, 32), (12.0, 1.0)))
    some = {(a, b): rate for (a, b), rate in every.items() if b - a in (1, 2, 4) or a % 8 == b % 8 == 0}
    found = find_levels(some, [rank // 8 for rank in range(32)])
    assert found.partitions == (runs(32, 8), runs(32, 32))
