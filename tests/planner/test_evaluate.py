"""The evaluator on plans worked out by hand, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.evaluate import evaluate
from pipeplan.plan import Plan, Stage
from pipeplan.problem import Options, Problem
from pipeplan.profile import Layer, Profile, Tensor


def _problem(**options: object) -> Problem:
    """a → b → c with a skip a → c, on 2 servers of 2; 100 bytes/s inside, 10 between."""
    profile = Profile(
        layers=(Layer("a", 2.0, 4.0, 50, 5), Layer("b", 1.0, 2.0, 20, 7), Layer("c", 0.5, 1.0, 100, 9)),
        tensors=(Tensor("x", "a", ("b", "c"), 40, 30), Tensor("y", "b", ("c",), 8, 8)),
        minibatch=1,
    )
    levels = (Level("server", 2, 100.0), Level("cluster", 2, 10.0, 0.25))
    return Problem(profile, Cluster("t", Device("d", "cpu", 1000), levels), Options(**options))  # type: ignore[arg-type]


def _plan(*stages: tuple[str, tuple[int, ...], int]) -> Plan:
    return Plan(tuple(Stage(tuple(layers), workers, depth, depth) for layers, workers, depth in stages))


def test_a_plan_over_two_servers_by_hand() -> None:
    score = evaluate(_plan(("a", (0, 1, 2), 3), ("bc", (3,), 1)), _problem(contention=False))
    first, last = score.stages
    assert first.compute_s == pytest.approx(6 / 3)
    # Ring over the link between servers: (2·2/3·50/10 + 2·2·0.25)/3.
    assert first.synchronisation_s == pytest.approx((2 * 2 / 3 * 50 / 10 + 1.0) / 3)
    assert (first.boundary_bytes, first.boundary_gradient_bytes) == (40, 30)
    assert first.boundary_level == 2
    assert first.boundary_s == pytest.approx(4.0)
    # Depth 3 on 3 replicas leaves 6 - 1 minibatches for two transfers of 4.25 s and what the all-reduce, of
    # 2·2/3·50/10 + 2·2·0.25 s, exceeds the pace by.
    group = 2 * 2 / 3 * 50 / 10 + 1.0
    assert first.depth_s == pytest.approx(max(2 * 4.25 / 5, (2 * 4.25 + group) / 6))
    assert last.compute_s == pytest.approx(4.5)
    assert score.pace_s == pytest.approx(4.5)
    assert score.bound == "compute of stage 2"
    # Gradient and momentum, boundary, buckets and a fourth version, and for each of three in flight a version, what is
    # saved, and the output.
    assert first.memory_bytes == pytest.approx(50 * 2 + 70 + 2 * 50 + 3 * (50 + 5 + 40))
    assert last.memory_bytes == pytest.approx(120 * 2 + 70 + (120 + 16 + 40))


def test_a_relayed_tensor_crosses_every_cut_once() -> None:
    score = evaluate(_plan(("a", (0,), 5), ("b", (1,), 3), ("c", (2,), 1)), _problem())
    assert [stage.boundary_bytes for stage in score.stages] == [40, 48, 0]
    assert [stage.boundary_level for stage in score.stages] == [1, 2, 0]


def test_copies_of_a_pipeline_share_the_pace_and_synchronise() -> None:
    stages = (Stage(("a",), (0, 2), 4, 5), Stage(("b", "c"), (1, 3), 1, 1))
    score = evaluate(Plan(stages, copies=2), _problem())
    # Two pipelines inside the servers, each bound by 6 s; all 170 bytes reduced between two: (2·1/2·17 + 2·0.25)/2.
    assert score.copies_s == pytest.approx((17 + 0.5) / 2)
    assert score.pace_s == pytest.approx(max(6 / 2, 8.75))
    assert score.bound == "synchronisation among the copies of the pipeline"
    assert Plan(stages, copies=2).config == "2×(1-1)"
    assert Plan(stages, copies=2).copy(1) == ((2,), (3,))


def test_too_small_a_depth_bounds_the_pace() -> None:
    score = evaluate(_plan(("ab", (0,), 2), ("c", (3,), 1)), _problem())
    # Two in flight, one of them at the next stage: none is left for the transfers, which take 2 · (4.8 + 0.25) s.
    assert score.stages[0].depth_s > 1e6
    assert score.bound == "minibatches in flight at stage 1"
    assert evaluate(_plan(("ab", (0,), 3), ("c", (3,), 1)), _problem()).stages[0].depth_s == pytest.approx(10.1)


def test_no_overlap_adds_synchronisation() -> None:
    plan = _plan(("abc", (0, 1), 1))
    together, apart = evaluate(plan, _problem()), evaluate(plan, _problem(overlap=0.0))
    stage = together.stages[0]
    assert apart.pace_s == pytest.approx(stage.compute_s + stage.synchronisation_s)
    assert together.pace_s == pytest.approx(max(stage.compute_s, stage.synchronisation_s))


def test_inference_costs_the_forward_pass_only() -> None:
    plan = replace(_plan(("a", (0,), 1), ("bc", (1,), 1)), inference=True)
    score = evaluate(plan, _problem(inference=True))
    assert score.pace_s == pytest.approx(2.0)
    assert [stage.boundary_gradient_bytes for stage in score.stages] == [0, 0]
    assert score.stages[0].memory_bytes == pytest.approx(50 + 40)


def test_layers_that_must_stay_together_are_contracted_with_what_lies_between() -> None:
    problem = _problem()
    tied = Problem(replace(problem.profile, together=(("a", "c"),)), problem.cluster)
    assert [unit.layers for unit in tied.units] == [("a", "b", "c")]
    with pytest.raises(InputError, match="must share a stage"):
        evaluate(_plan(("ab", (0,), 2), ("c", (1,), 1)), tied)


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (_plan(("ab", (0,), 1)), "'c' is in only one"),
        (_plan(("abc", (0,), 1), ("c", (1,), 1)), "'c' in two stages"),
        (_plan(("b", (0,), 1), ("ac", (1,), 1)), "puts 'b' before"),
        (_plan(("ab", (0, 1), 1), ("c", (1,), 1)), "one worker to two stages"),
        (_plan(("abc", (4,), 1)), "uses worker 4, but the cluster has workers 0 to 3"),
        (_plan(("abc", (), 1)), "needs a worker"),
    ],
)
def test_what_is_no_plan_is_refused(plan: Plan, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        evaluate(plan, _problem())


def test_impossible_options_are_refused() -> None:
    with pytest.raises(InputError, match="5 stages asked for, but the model has only 3"):
        _problem(stages=5)
    with pytest.raises(InputError, match="between 0 and 1"):
        _problem(overlap=1.5)
    with pytest.raises(InputError, match="at least 1"):
        _problem(max_replicas=0)
