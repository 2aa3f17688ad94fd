"""The first cause of a difference, on summaries whose cause was put there."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeplan_launch.telemetry.slowdown_cause import first_cause

PAIRS = ("forward_s", "backward_s", "update_s", "sync_s")
OWN = ("load_s", "send_s", "other_s")


def stage(workers: list[int], predicted: dict[str, float], measured: dict[str, float], **more: Any) -> dict[str, Any]:
    """One stage of a summary; times that are not given are 0, measured ones as predicted."""
    before = {name: predicted.get(name, 0.0) for name in PAIRS}
    after = before | dict.fromkeys(OWN, 0.0) | measured
    pairs = {name: {"predicted": before[name], "measured": after[name]} for name in PAIRS}
    busy = sum(after.values())
    own = {name: after[name] for name in OWN} | {"wait_s": 0.0}
    own |= {"cpu_s": more.pop("cpu_s", busy), "core_wait_s": more.pop("core_wait_s", 0.0)}
    return {"workers": workers, "versions": 1, "cores": 0, "boundary_s": 0.0, "measured": own} | pairs | more


def summary(predicted_s: float, measured_s: float, *stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    step_time = {"predicted": predicted_s, "measured": measured_s}
    shared = {"schedule": "1f1b-stashing", "accumulate": None, "server_sizes": [8], "profile": "measured"}
    shared |= {"device": "cpu", "emulated": False}
    return shared | {"minibatch_s": step_time, "stages": list(stages)} | more


FORWARD = {"forward_s": 0.010, "backward_s": 0.020}


def test_a_slow_backward_is_named_with_its_figures() -> None:
    slow = stage([1], {"forward_s": 0.009, "backward_s": 0.031}, {"backward_s": 0.041})
    cause = first_cause(summary(0.040, 0.050, stage([0], FORWARD, {}), slow))
    assert cause is not None
    assert (cause.kind, cause.stage) == ("backward", 1)
    assert cause.explains == pytest.approx(1.0)
    assert cause.text.startswith("stage 1's backward takes 1.32 times the predicted time (41 ms, predicted 31 ms)")
    assert "profiled under another load" in cause.text


def test_nothing_is_named_where_the_step_time_is_as_predicted() -> None:
    """Also where a stage that does not bind is off."""
    idle = stage([1], {"forward_s": 0.001}, {"forward_s": 0.009})
    assert first_cause(summary(0.030, 0.0308, stage([0], FORWARD, {}), idle)) is None


@pytest.mark.parametrize(
    ("term", "kind", "words"),
    [
        ("update_s", "update", "its weights are copied for the 3 versions"),
        ("sync_s", "all-reduce", "waiting for all-reduces at stage 0 takes 12 ms a minibatch, which the prediction"),
        ("load_s", "reading of samples", "`Data(processes=…)` reads ahead"),
        ("send_s", "handing over of tensors", "handing tensors over at stage 0 takes 12 ms"),
        ("other_s", "executor itself", "the executor's own work at stage 0"),
    ],
)
def test_what_the_prediction_leaves_out_is_named(term: str, kind: str, words: str) -> None:
    cause = first_cause(summary(0.030, 0.042, stage([0], FORWARD, {term: 0.012}, versions=3)))
    assert cause is not None
    assert (cause.kind, cause.stage) == (kind, 0)
    assert words in cause.text


def test_where_no_stage_is_busy_they_wait_for_each_other() -> None:
    cause = first_cause(summary(0.030, 0.040, stage([0], FORWARD, {}), stage([1], FORWARD, {"backward_s": 0.021})))
    assert cause is not None
    assert (cause.kind, cause.stage) == ("waiting", None)
    assert cause.explains == pytest.approx(0.9)
    assert "the busiest, 1, for 78% of it (31 ms of 40 ms a minibatch)" in cause.text


def test_a_link_that_was_to_bind_is_named() -> None:
    first = stage([0], FORWARD, {}, boundary_s=0.050)
    cause = first_cause(summary(0.050, 0.080, first, stage([1], FORWARD, {})))
    assert cause is not None
    assert (cause.kind, cause.stage) == ("link", 0)
    assert "the link from stage 0 to stage 1 is busy for 50 ms a minibatch by the plan" in cause.text


def test_a_run_may_be_faster_than_predicted() -> None:
    fast = stage([1], {"forward_s": 0.010, "backward_s": 0.050}, {"backward_s": 0.030})
    cause = first_cause(summary(0.060, 0.040, stage([0], FORWARD, {}), fast))
    assert cause is not None
    assert (cause.kind, cause.stage) == ("backward", 1)
    assert "takes 0.60 times the predicted time (30 ms, predicted 50 ms)" in cause.text


def test_replicas_share_what_a_stage_has_to_do() -> None:
    """Two replicas of the first stage: 25 ms a minibatch of the pipeline; the second stage's 30 ms bind."""
    first = stage([0, 1], {"forward_s": 0.020, "backward_s": 0.020}, {"backward_s": 0.030})
    cause = first_cause(summary(0.020, 0.030, first, stage([2], {"forward_s": 0.020}, {"forward_s": 0.030})))
    assert cause is not None
    assert (cause.kind, cause.stage) == ("forward", 1)


def test_a_worker_whose_core_others_use_is_told_from_a_wrong_profile() -> None:
    """All that is slower by the clock is waiting for a core; or half of it, and the rest the backward pass."""
    slow = stage([0], FORWARD, {"forward_s": 0.02, "backward_s": 0.04}, core_wait_s=0.030)
    cause = first_cause(summary(0.030, 0.060, slow))
    assert cause is not None
    assert (cause.kind, cause.stage, cause.explains) == ("core", 0, pytest.approx(1.0))
    assert cause.text.startswith("waiting for a core at stage 0 takes 30 ms a minibatch")
    assert "other programs use this machine" in cause.text
    both = stage([0], FORWARD, {"forward_s": 0.0125, "backward_s": 0.0625}, core_wait_s=0.015)
    cause = first_cause(summary(0.030, 0.075, both))
    assert cause is not None
    assert cause.kind == "backward"
    assert "2.50 times the predicted time (50 ms without waiting for a core, predicted 20 ms)" in cause.text
    for other in ({"device": "cuda"}, {"emulated": True}):
        elsewhere = first_cause(summary(0.030, 0.060, slow, **other))
        assert elsewhere is not None
        assert elsewhere.kind == "backward"


def test_waiting_for_a_shared_core_is_no_work() -> None:
    """Three workers on two cores take longer by the clock, and compute what was predicted but for one update."""
    wall = {"forward_s": 0.015, "backward_s": 0.030}
    stages = [stage([worker], FORWARD, wall, cpu_s=0.030, cores=2) for worker in range(2)]
    last = stage([2], FORWARD, {"forward_s": 0.013, "backward_s": 0.026, "update_s": 0.013}, cpu_s=0.040, cores=2)
    cause = first_cause(summary(0.045, 0.050, *stages, last))
    assert cause is not None
    assert (cause.kind, cause.stage) == ("update", 2)


def test_what_several_stages_share_is_said() -> None:
    slow = {"forward_s": 0.012, "backward_s": 0.024}
    cause = first_cause(summary(0.030, 0.036, stage([0], FORWARD, slow), stage([1], FORWARD, slow)))
    assert cause is not None
    assert cause.kind == "backward"
    assert "so do the passes of all stages" in cause.text


def test_a_calibrated_prediction_has_the_executor_in_its_passes() -> None:
    """Handing over is in the predicted passes, so that it is not left out."""
    one = stage(
        [0], {"forward_s": 0.015, "backward_s": 0.030}, {"forward_s": 0.010, "backward_s": 0.020, "send_s": 0.02}
    )
    cause = first_cause(summary(0.045, 0.050, one, profile="calibrated"))
    assert cause is not None
    assert cause.text.startswith("stage 0's passes, with what the executor does besides, take 1.11 times")


def test_an_estimate_is_called_one() -> None:
    slow = stage([0], FORWARD, {"backward_s": 0.040})
    cause = first_cause(summary(0.030, 0.050, slow, profile="modelled"))
    assert cause is not None
    assert "its profile is an estimate, not measured" in cause.text


def test_with_a_flush_a_stage_costs_its_share_of_filling_too() -> None:
    """Four minibatches an update, two stages of 30 ms: 5 passes in 4 step times. One stage takes 40 ms: 40 + 30 + 3 ·
    40.
    """
    slow = stage([1], FORWARD, {"backward_s": 0.030})
    given = {"schedule": "gpipe", "accumulate": 4}
    cause = first_cause(summary(5 * 0.030 / 4, 0.190 / 4, stage([0], FORWARD, {}), slow, **given))
    assert cause is not None
    assert (cause.kind, cause.stage) == ("backward", 1)
    assert cause.explains == pytest.approx(1.0)


def test_what_was_not_predicted_or_measured_has_no_cause() -> None:
    good = stage([0], FORWARD, {})
    assert first_cause(summary(0.030, 0.060, good | {"forward_s": {"predicted": None, "measured": 0.01}})) is None
    assert first_cause(summary(0.030, 0.060, good | {"forward_s": {"predicted": 0.01, "measured": None}})) is None
    assert first_cause(summary(0.030, None, good)) is None  # type: ignore[arg-type]
    assert first_cause(summary(None, 0.030, good)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_a_term_that_alone_was_made_slower_is_found(seed: int) -> None:
    """Of random stages the slowest gets one slower term; the step time then follows by the formula of the cost
    model.
    """
    rng = random.Random(seed)
    replicas = [rng.randint(1, 3) for _ in range(rng.randint(1, 4))]
    times = [{name: rng.uniform(0.001, 0.02) for name in ("forward_s", "backward_s", "update_s")} for _ in replicas]
    each = [sum(one.values()) / count for one, count in zip(times, replicas, strict=True)]
    slowest = max(range(len(each)), key=lambda index: each[index])
    term = rng.choice([*PAIRS, *OWN])
    added = rng.uniform(0.2, 1.0) * each[slowest] * replicas[slowest]
    stages, first = [], 0
    for index, (one, count) in enumerate(zip(times, replicas, strict=True)):
        measured = {term: one.get(term, 0.0) + added} if index == slowest else {}
        stages.append(stage(list(range(first, first + count)), one, measured))
        first += count
    cause = first_cause(summary(each[slowest], each[slowest] + added / replicas[slowest], *stages))
    assert cause is not None
    assert cause.stage == slowest
    assert cause.explains == pytest.approx(1.0)
    assert cause.kind in {"forward_s": "forward", "backward_s": "backward", "update_s": "update"}.get(term, cause.kind)
