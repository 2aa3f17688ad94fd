"""The sentence that says where the difference comes from, on replays whose cause is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from replay_builders import FAST, LINK, REPLAYED, STAGE
from replay_cause import replay_cause


def test_a_small_difference_has_no_cause() -> None:
    assert replay_cause(replace(REPLAYED, measured_s=0.1029)) == "As predicted, within 3%."


def test_a_machine_that_is_full_comes_first() -> None:
    assert "97% of the time, so that workers waited" in replay_cause(replace(REPLAYED, cores_busy=0.97))


def test_a_replay_that_varies_says_so() -> None:
    assert "Parts of the replay differ by as much (± 6.0%)" in replay_cause(replace(REPLAYED, spread=0.06))


def test_a_stage_that_computes_for_too_long() -> None:
    slow = replace(STAGE, backward_s=0.16)
    assert replay_cause(replace(REPLAYED, stages=(slow, FAST))) == (
        "Stage 1 took 240 ms to compute a minibatch, not the 200 ms that it was asked to sleep; that explains 100% of "
        "the difference."
    )


def test_a_stage_that_is_held_up_by_its_all_reduces() -> None:
    text = replay_cause(replace(REPLAYED, stages=(replace(STAGE, sync_s=0.03), FAST)))
    assert text.startswith("Stage 1 was held up by its all-reduces for 30 ms of every minibatch; that explains 75%")


def test_a_link_that_carries_more_than_was_thought() -> None:
    busy = replace(LINK, busy=0.98, predicted_busy=0.8)
    text = replay_cause(replace(REPLAYED, links=(busy,)))
    assert text.startswith("The link of server 1 was busy 118 ms a minibatch (in), where 80 ms was predicted")


def test_what_the_order_alone_explains() -> None:
    text = replay_cause(replace(REPLAYED, simulated_s=0.118))
    assert text.startswith("The order of passes and messages alone gives 118 ms")


def test_what_nothing_explains_is_waiting() -> None:
    text = replay_cause(replace(REPLAYED, stages=(replace(STAGE, wait_s=0.04), FAST)))
    assert text.startswith("Nothing is busy all the time")
    assert "stage 1, the busiest, computes 83% of the time and waits 40 ms a minibatch for messages" in text
    assert "of server 1, carries 50%" in text


def test_what_is_faster_names_what_took_less() -> None:
    quick = replace(STAGE, backward_s=0.08)
    text = replay_cause(replace(REPLAYED, measured_s=0.085, stages=(quick, FAST)))
    assert text.endswith("stage 1 computed for 80 ms a minibatch, not 100 ms.")


def test_the_document_has_the_derived_figures() -> None:
    document = REPLAYED.to_json()
    assert document["error"] == pytest.approx(0.2)
    assert document["stages"][0]["busy"] == pytest.approx(0.2 / 0.24)
    assert document["stages"][0]["predicted_busy"] == pytest.approx(1.0)
    assert document["links"][0]["predicted_busy"] == 0.5
