"""How flows share network cards in the simulation: fairly, in the order in which they began, with weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from pipeplan.simulation.events import EventQueue
from pipeplan.simulation.fair_share import Card, FlowKind, SharedNetwork, Use, flow_kind, reduced_kinds, share_cards


def _ends(kinds: Sequence[FlowKind], flows: Sequence[tuple[float, float]]) -> list[float]:
    """The times at which flows end that start at a time and take some seconds at full speed: (start, seconds)."""
    queue, ended = EventQueue(), dict[int, float]()
    network = SharedNetwork(queue, kinds)
    for number, (start_s, duration_s) in enumerate(flows):
        done = partial(lambda one: ended.setdefault(one, queue.now), number)
        queue.at(start_s, 0, network.start, duration_s, number, done)
    while queue.pop():
        pass
    # Speeds change where flows start or end, and not where an arrival was expected before it was put off.
    assert network._plans <= len({start for start, _ in flows}) + len(flows)
    return [ended[number] for number in range(len(flows))]


def test_flows_share_cards_fairly() -> None:
    """Two flows of 4 s over one card: the second, which began at 1 s, slows the first down, and then has it alone."""
    card, other = Card(), Card()
    uses: list[Use] = [{card: 1.0}, {card: 1.0, other: 0.1}, {other: 0.5}]
    # The first has 3 s left at 1 s, and half the card until 7 s; the second then 1 s.
    assert _ends([flow_kind(use) for use in uses], [(0, 4), (1, 4), (1, 3)]) == pytest.approx([7.0, 8.0, 4.0])
    assert _ends([flow_kind({card: 1.0})] * 2, [(0, 4), (1, 4)]) == pytest.approx([7.0, 8.0])
    # Four fifths of the card for an all-reduce of weight 4.
    assert _ends([flow_kind({card: 1.0}, 4.0), flow_kind({card: 1.0})], [(0, 1), (0, 1)]) == pytest.approx([1.25, 2.0])


def test_a_flow_has_what_the_others_cannot_use() -> None:
    """Shares of two cards at full speed, and the speeds that are max-min fair; an all-reduce has a weight of 4."""
    a, b = Card(), Card()
    uses: list[tuple[list[Use], list[float]]] = [
        ([{a: 1.0}, {a: 1.0}], [0.5, 0.5]),
        ([{a: 0.2}, {a: 1.0}], [1.0, 0.8]),
        ([{a: 20.0}], [0.05]),
        # The first is held to half of b by the second, which leaves the third the rest of a.
        ([{a: 1.0, b: 1.0}, {b: 1.0}, {a: 0.5}], [0.5, 0.5, 1.0]),
        ([{a: 1.0, b: 1.0}, {b: 1.0}, {b: 1.0}, {a: 1.0}], [1 / 3, 1 / 3, 1 / 3, 2 / 3]),
        ([{}, {a: 3.0}, {a: 1.0}], [1.0, 1 / 6, 0.5]),
    ]
    for flows, speeds in uses:
        assert share_cards([flow_kind(use) for use in flows]) == pytest.approx(speeds)
    beside: list[tuple[list[Use], list[float]]] = [
        ([{a: 1.0}, {a: 1.0}, {a: 1.0}], [4 / 6, 1 / 6, 1 / 6]),
        ([{a: 0.5}, {a: 1.0}, {a: 0.1}], [1.0, 0.4, 1.0]),
        ([{a: 1.0, b: 2.0}, {a: 1.0}, {}], [0.5, 0.5, 1.0]),
    ]
    for flows, speeds in beside:
        kinds = [flow_kind(use, weight) for use, weight in zip(flows, (4.0, 1.0, 1.0), strict=True)]
        assert share_cards(kinds) == pytest.approx(speeds)


def test_messages_that_began_earlier_have_more_of_a_card() -> None:
    """Three messages on a card, each with 0.9 of the weight of the one before it, and one that has another card."""
    card, other = Card(), Card()
    uses = [{card: 1.0}, {card: 1.0, other: 0.1}, {other: 0.5}, {card: 1.0}]
    alone = [flow_kind(use, is_message=True) for use in uses]
    assert share_cards(alone) == pytest.approx([1 / 2.71, 0.9 / 2.71, 1.0, 0.81 / 2.71])
    # The second of two messages on one card is the first of two on another.
    crossing = [flow_kind(use, is_message=True) for use in ({other: 1.0}, {card: 1.0, other: 1.0}, {card: 1.0})]
    assert share_cards(crossing) == pytest.approx([1 / 1.9, 0.9 / 1.9, 1 / 1.9])
    beside = [*alone[:2], alone[3], flow_kind({card: 1.0}, 3.0)]
    assert share_cards(beside) == pytest.approx([0.5 / 2.71, 0.45 / 2.71, 0.405 / 2.71, 0.5])


def test_speeds_do_not_depend_on_the_cards_that_are_left_out() -> None:
    """Of random flows on six cards, of which some are never full, or never before another one."""
    rng, fewer = random.Random(3), 0
    for _ in range(100):
        cards = [Card() for _ in range(6)]
        kinds = []
        for number in range(rng.randint(2, 12)):
            use = {card: rng.choice((0.1, 0.5, 1.0)) for card in rng.sample(cards, rng.randint(1, 4))}
            kinds.append(flow_kind(use, rng.choice((1.0, 4.5)) if number % 3 else 1.0, is_message=bool(number % 3)))
        reduced = reduced_kinds(kinds)
        fewer += sum(len(kind.shares) for kind in kinds) - sum(len(kind.shares) for kind in reduced)
        under_way = rng.sample(range(len(kinds)), rng.randint(1, len(kinds)))
        speeds = [share_cards([found[number] for number in under_way]) for found in (kinds, reduced)]
        assert speeds[0] == pytest.approx(speeds[1], rel=1e-12)
    assert fewer > 100
