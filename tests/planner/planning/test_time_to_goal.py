"""`--objective time-to-goal`: rates are divided by the cost in samples; 2BW where stashing updates too rarely."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from commandline import Run

from pipeplan.checker.description import check_goal_choice
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.planning.choose_synchrony import RATE, TIME_TO_GOAL, SynchronyChoice, choose_synchrony
from pipeplan.problem.options import Options
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node


def _choice(optimizer: str, workers: int = 2, objective: str = TIME_TO_GOAL, **more: Any) -> SynchronyChoice:
    """Of a model of two like layers with heavy weights, whose pipeline is faster than data parallelism."""
    layers = tuple(Layer(name, 0.01, 0.02, 1 << 27, 1000) for name in ("a", "b"))
    profile = Profile(layers, (Tensor("t", "a", ("b",), 1000, 1000),), 4, optimizer_state_ratio=2.0)
    profile = replace(profile, optimizer_name=optimizer)
    cluster = Cluster("some", Device("d", "cuda", 1 << 36), (Level("server", workers, 1e9),))
    given: dict[str, Any] = {"batch": None, "staleness": None, "gain": 0.1, "maximum_cuts": 1000} | more
    return choose_synchrony(profile, cluster, Options(), **given, may_correct=True, objective=objective)


def test_the_plan_with_the_least_product_of_time_and_measured_cost_is_taken() -> None:
    choice = _choice("AdamW")
    assert choice.taken is choice.asynchronous
    best, other = choice.asynchronous, _choice("AdamW", objective=RATE).asynchronous
    assert best is not None
    assert other is not None
    assert best.learning is not None
    assert best.learning.cost is not None
    assert best.cost == max(1.0, best.learning.cost)
    assert best.goal_sample_s == pytest.approx(best.sample_s * best.cost)
    assert other.goal_sample_s is None or best.goal_sample_s <= other.goal_sample_s
    assert f"at {best.cost:.2f} x the samples as measured on small models" in choice.reason
    # The same pipeline is not taken where its cost in samples leaves less than the gain that is asked for.
    assert choice.synchronous is not None
    found = choice.synchronous.sample_s / best.goal_sample_s - 1
    more = _choice("AdamW", gain=found * 1.01)
    assert more.taken is more.synchronous
    assert found < choice.synchronous.sample_s / best.sample_s - 1


def test_where_nothing_is_measured_the_rate_decides_and_the_reason_says_so() -> None:
    choice, by_rate = _choice("Adagrad"), _choice("Adagrad", objective=RATE)
    assert choice.taken.plan == by_rate.taken.plan
    assert choice.reason.startswith(by_rate.reason)
    assert "By the rate alone: no cost in samples to the goal is measured for Adagrad" in choice.reason
    assert choice.to_json()["asynchronous"]["goal_cost"] is None
    assert "objective" not in by_rate.to_json()


def test_a_way_of_training_that_was_seen_to_fail_is_not_taken() -> None:
    """SGD with momentum: some seeds on the digits do not reach the goal, with whatever staleness."""
    choice = _choice("SGD")
    assert _choice("SGD", objective=RATE).taken.updates.stale_by != (0,)
    assert choice.taken is choice.synchronous
    assert "SGD with momentum did not reach the goal in all measured runs" in choice.reason


def _same(stated: Node, computed: float) -> None:
    if stated.number() != pytest.approx(computed, rel=1e-9):
        stated.fail("differs")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("asynchronous", "goal_cost"), 1.01),
        (("asynchronous", "goal_sample_s"), 1e-9),
        (("asynchronous", "learning", "samples_ratio"), 1.01),
        (("asynchronous", "learning", "source"), ""),
        (("asynchronous", "learning"), None),
        (("synchronous", "goal_sample_s"), 1e-9),
        (("asynchronous_gain",), 1e9),
        (("taken",), "neither"),
        (("objective",), "fame"),
    ],
)
def test_the_checker_refuses_a_figure_that_does_not_follow(path: tuple[str, ...], value: object) -> None:
    document = json.loads(json.dumps({"choice": _choice("AdamW").to_json()}))
    check_goal_choice(Node(deepcopy(document), "plan.json"), _same)
    at = document["choice"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(InputError):
        check_goal_choice(Node(document, "plan.json"), _same)


def test_a_named_schedule_leaves_nothing_to_compare(run: Run) -> None:
    words = ("solve", "mnist-v100", "--cluster", "C", "--no-write")
    done = run(*words, "--schedule", "2bw", "--accumulate", "4", "--objective", "time-to-goal")
    assert (done.code, done.out) == (2, "")
    assert "--objective time-to-goal compares schedules" in done.err
    assert "there is no objective 'fame'" in run(*words, "--objective", "fame").err


def test_2bw_keeps_the_batch_where_a_replicated_stage_would_update_less_often() -> None:
    """Of 3 workers two compute the larger half: with stashing they update every 8 samples, and 4 are asked for."""
    layers = (Layer("a", 0.02, 0.04, 1 << 20, 1000), Layer("b", 0.01, 0.02, 1 << 29, 1000))
    profile = Profile(layers, (Tensor("t", "a", ("b",), 1000, 1000),), 4, optimizer_name="AdamW")
    half = profile.rescaled(2)
    profile = replace(profile, sizes=(type(profile.all_sizes[0])(2, half.layers, half.tensors),))
    cluster = Cluster("three", Device("d", "cuda", 1 << 36), (Level("server", 3, 1e9),))
    kept = choose_synchrony(profile, cluster, Options(), 4, "any", 0.1, 1000).asynchronous
    free = choose_synchrony(profile, cluster, Options(), None, "any", 0.1, 1000).asynchronous
    assert free is not None
    assert kept is not None
    assert (free.plan.config, free.plan.schedule, free.updates.samples) == ("2-1", "1f1b-stashing", (8, 4))
    assert kept.plan.schedule == "2bw"
    assert set(kept.updates.samples) == {4}
