"""The replay of shared cards on cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import shared_cards
from shared_cards import SHARING, UNLIMITED, Flow, Setting


def _flows(*cards: str, rings: str = "") -> list[Flow]:
    """Flows by the numbers of the cards that they cross."""
    return [Flow(tuple((int(one), True) for one in crossed), 1.0, crossed == rings, lambda: None) for crossed in cards]


@pytest.mark.parametrize(
    ("sharing", "rates"),
    [
        # The second crosses two cards. Card 0 is the fuller one: a third each, and the fourth takes the rest of card 1.
        ("fair", [1 / 3, 1 / 3, 1 / 3, 2 / 3]),
        ("first", [1.0, 0.0, 0.0, 1.0]),
        ("ring", [0.0, 1.0, 0.0, 0.0]),
        ("messages", [1.0, 0.0, 0.0, 1.0]),
    ],
)
def test_rates(sharing: str, rates: list[float]) -> None:
    flows = _flows("0", "01", "0", "1", rings="01")
    SHARING[sharing](flows)
    assert [flow.rate for flow in flows] == pytest.approx(rates)


def _setting(**fields: object) -> Setting:
    """2-1 on servers of 2: two senders share their card, and the receiver is elsewhere."""
    made = Setting((2, 1), (2, 1), (1.0, 0.1), (1.0, 0.1), (0.25,), (0.0,), (0.0, 0.0), 2)
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("sharing", SHARING)
def test_light_traffic_keeps_the_pace_of_the_computing(sharing: str) -> None:
    # Two replicas of 2 s each: 1 s per minibatch.
    assert shared_cards.share(_setting(), sharing, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("sharing", SHARING)
def test_a_card_that_is_always_busy_sets_the_pace(sharing: str) -> None:
    setting = _setting(activation_s=(3.0,), depths=(4, 1))
    assert shared_cards.share(setting, sharing, 3.0) == pytest.approx(1.0, abs=5e-3)


def test_a_ring_takes_turns_with_messages() -> None:
    """3-1 on servers of 2: of 3 minibatches 2 messages of 1.5 s and a ring of 3 s need the second server's card."""
    setting = Setting((3, 1), (4, 1), (0.3, 0.1), (0.3, 0.1), (1.5,), (0.0,), (3.0, 0.0), 2)
    _, pace_s = shared_cards.planned(setting)
    assert pace_s == pytest.approx(2.0)
    assert shared_cards.share(setting, "ring", pace_s) <= 1 + 1e-6
    assert shared_cards.share(setting, "fair", pace_s) <= 1 + 1e-6


def test_the_burst_of_fifteen_to_one_is_slower_where_shares_are_fair() -> None:
    setting, pace_s = shared_cards.planned(shared_cards.vgg(5.45))
    fair, ring, window = (
        shared_cards.share(replace(setting, window=window), sharing, pace_s)
        for sharing, window in (("fair", UNLIMITED), ("ring", UNLIMITED), ("fair", 2))
    )
    assert fair < 0.75
    assert ring > 0.99
    assert 0.9 < window < 0.99
