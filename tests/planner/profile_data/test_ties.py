"""Layers that share weights or memory, and the layers between them."""

from __future__ import annotations

from decoders import decoder, problem

from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import edges
from pipeplan.profile_data.ties import HeldLayers, held_layers


def held(names: str, arrows: list[str], *groups: str) -> list[HeldLayers]:
    return held_layers(list(names), [(arrow[0], arrow[1]) for arrow in arrows], [list(group) for group in groups])


def test_layers_between_a_group_are_counted() -> None:
    chain = ["ab", "bc", "cd", "de"]
    assert held("abcde", chain, "bd") == [HeldLayers(("b", "d"), 1, 2)]
    assert held("abcde", chain, "ab") == [HeldLayers(("a", "b"), 0, 3)]
    assert held("abcde", chain) == []


def test_groups_that_overlap_are_one() -> None:
    chain = ["ab", "bc", "cd", "de"]
    assert held("abcde", chain, "ac", "bd") == [HeldLayers(("a", "b", "c", "d"), 0, 1)]
    assert held("abcde", ["ac", "ce", "bd", "de"], "ac", "bd") == [
        HeldLayers(("a", "c"), 0, 3),
        HeldLayers(("b", "d"), 0, 3),
    ]


def test_they_are_the_units_that_a_problem_makes() -> None:
    profile = decoder(3, tied=True)
    built: Problem = problem(profile)
    (one,) = held_layers([layer.name for layer in profile.layers], edges(profile.tensors), profile.together)
    sizes = sorted(len(unit.layers) for unit in built.units)
    assert sizes == [1] * one.others + [len(one.group) + one.between]


def test_what_people_read() -> None:
    assert HeldLayers(("a", "b"), 0, 0).text() == (
        "'a' and 'b' have weights or memory in common and stay in one stage; there is no place to cut"
    )
    said = "'a', 'b', 'c' and 2 more have the weights w in common and stay in one stage with the 1 layer between them"
    assert HeldLayers(tuple("abcde"), 1, 7).text("the weights w").startswith(said)
