"""Ideals, strong components and cycles of small graphs, against their definitions."""

from __future__ import annotations

import itertools

import pytest

from pipeplan.util import graph


def _is_ideal(members: set[int], edges: list[tuple[int, int]]) -> bool:
    return all(source in members for source, target in edges if target in members)


GRAPHS: dict[int, list[list[tuple[int, int]]]] = {
    1: [[]],
    3: [[]],
    4: [[(0, 1), (1, 2), (2, 3)], [(0, 1), (0, 2), (1, 3), (2, 3)]],
    5: [[(0, 4), (1, 4)]],
}


def test_ideals_are_all_down_sets_and_subsets_come_first() -> None:
    for count, edges in ((count, edges) for count, graphs in GRAPHS.items() for edges in graphs):
        found = graph.ideals(count, edges, limit=1000)
        subsets = [set(c) for n in range(count + 1) for c in itertools.combinations(range(count), n)]
        expected = {sum(1 << node for node in members) for members in subsets if _is_ideal(members, edges)}
        assert set(found) == expected
        assert len(found) == len(expected)
        assert found == sorted(found, key=lambda ideal: (ideal.bit_count(), ideal))


def test_too_many_ideals_are_said_not_enumerated() -> None:
    with pytest.raises(graph.TooManyIdeals, match="more than 100 cuts"):
        graph.ideals(40, [], limit=100)


def test_strong_components_are_in_topological_order_and_keep_the_given_one() -> None:
    nodes = list("abcdef")
    edges = [("a", "b"), ("b", "c"), ("c", "b"), ("c", "d"), ("e", "f")]
    assert graph.strong_components(nodes, edges) == [["a"], ["b", "c"], ["d"], ["e"], ["f"]]


def test_a_cycle_is_found_and_named() -> None:
    cycle = graph.find_cycle(list("abcd"), [("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")])
    assert cycle[0] == cycle[-1]
    assert set(cycle) == {"b", "c"}
    assert graph.find_cycle(["a"], [("a", "a")]) == ["a", "a"]
    assert graph.find_cycle(list("abc"), [("a", "b"), ("a", "c"), ("b", "c")]) == []
