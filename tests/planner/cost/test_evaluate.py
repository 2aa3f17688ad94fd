"""The evaluator on plans worked out by hand, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile


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
    # 2·2/3·50/10 + 2·2·0.25 s, exceeds the step time by.
    group = 2 * 2 / 3 * 50 / 10 + 1.0
    assert first.depth_s == pytest.approx(max(2 * 4.25 / 5, (2 * 4.25 + group) / 6))
    assert last.compute_s == pytest.approx(4.5)
    assert score.step_time_s == pytest.approx(4.5)
    assert score.bound == "compute of stage 2"
    # Gradient and momentum, boundary, buckets and a fourth version, and for each of three in flight a version, what is
    # saved, and the output.
    assert first.memory_bytes == pytest.approx(50 * 2 + 70 + 2 * 50 + 3 * (50 + 5 + 40))
    assert last.memory_bytes == pytest.approx(120 * 2 + 70 + (120 + 16 + 40))


def test_a_relayed_tensor_crosses_every_cut_once() -> None:
    score = evaluate(_plan(("a", (0,), 5), ("b", (1,), 3), ("c", (2,), 1)), _problem())
    assert [stage.boundary_bytes for stage in score.stages] == [40, 48, 0]
    assert [stage.boundary_level for stage in score.stages] == [1, 2, 0]


def test_copies_of_a_pipeline_share_the_step_time_and_synchronise() -> None:
    stages = (Stage(("a",), (0, 2), 4, 5), Stage(("b", "c"), (1, 3), 1, 1))
    score = evaluate(Plan(stages, copies=2), _problem())
    # Two pipelines inside the servers, each bound by 6 s; all 170 bytes reduced between two: (2·1/2·17 + 2·0.25)/2.
    assert score.copies_s == pytest.approx((17 + 0.5) / 2)
    assert score.step_time_s == pytest.approx(max(6 / 2, 8.75))
    assert score.bound == "synchronisation among the copies of the pipeline"
    assert Plan(stages, copies=2).config == "2×(1-1)"
    assert Plan(stages, copies=2).copy(1) == ((2,), (3,))


def test_too_small_a_depth_bounds_the_step_time() -> None:
    score = evaluate(_plan(("ab", (0,), 2), ("c", (3,), 1)), _problem())
    # Two in flight, one of them at the next stage: none is left for the transfers, which take 2 · (4.8 + 0.25) s.
    assert score.stages[0].depth_s > 1e6
    assert score.bound == "minibatches in flight at stage 1"
    assert evaluate(_plan(("ab", (0,), 3), ("c", (3,), 1)), _problem()).stages[0].depth_s == pytest.approx(10.1)


def test_no_overlap_adds_synchronisation() -> None:
    plan = _plan(("abc", (0, 1), 1))
    together = evaluate(plan, _problem(contention=False))
    apart = evaluate(plan, _problem(contention=False, overlap=0.0))
    stage = together.stages[0]
    assert apart.step_time_s == pytest.approx(stage.compute_s + stage.synchronisation_s)
    assert together.step_time_s == pytest.approx(max(stage.compute_s, stage.synchronisation_s))


def test_inference_costs_the_forward_pass_only() -> None:
    plan = replace(_plan(("a", (0,), 1), ("bc", (1,), 1)), inference=True)
    score = evaluate(plan, _problem(inference=True))
    assert score.step_time_s == pytest.approx(2.0)
    assert [stage.boundary_gradient_bytes for stage in score.stages] == [0, 0]
    assert score.stages[0].memory_bytes == pytest.approx(50 + 40)


def _scheduled(schedule: str, accumulate: int | None, *stages: tuple[str, tuple[int, ...], int]) -> Plan:
    return replace(_plan(*stages), schedule=schedule, accumulate=accumulate)


def test_a_batch_with_a_flush_by_hand() -> None:
    """5 minibatches on a | bc, two replicas and one: 3 rounds at the first stage, 5 at the second."""
    problem = _problem(schedule="1f1b-flush", accumulate=5, contention=False)
    score = evaluate(_scheduled("1f1b-flush", 5, ("a", (0, 1), 3), ("bc", (2,), 1)), problem)
    assert score.batch is not None
    # The second stage has 5 · 4.5 s to do, after the first one's 6 s and the messages.
    assert score.batch.work_s == pytest.approx(6 + 4.5)
    # 40 bytes there and 30 back at 10 bytes/s, and the latency twice.
    assert score.batch.transfers_s == pytest.approx(4 + 3 + 0.5)
    # The second stage 4 · 4.5; the first takes 3 · 6, and the messages 5 · 4 after its first pass.
    assert score.batch.steady_s == pytest.approx(18)
    assert score.batch.bound == "compute of stage 2"
    # Two replicas inside a server, 2 · 1/2 · 50 / 100, hide behind the last backward pass of the first stage.
    assert score.batch.exposed_s == 0
    assert score.step_time_s == pytest.approx((10.5 + 7.5 + 18) / 5)
    assert score.stages[0].memory_bytes == pytest.approx(50 * 2 + 70 + 50 + 50 + 3 * (5 + 40))


def test_messages_and_all_reduces_may_take_longer_than_any_stage() -> None:
    problem = _problem(schedule="1f1b-flush", accumulate=9, contention=False, overlap=0.0)
    score = evaluate(_scheduled("1f1b-flush", 9, ("a", (0,), 9), ("bc", (2, 3), 1)), problem)
    assert score.batch is not None
    # The first stage's 9 · 6 s: the second has 5 · 4.5 after 13.5 s, and 1.2 s for its all-reduce before them.
    assert (score.batch.bound, score.batch.total_s) == ("compute of stage 1", pytest.approx(54))
    slow = _problem(schedule="1f1b-flush", accumulate=18, contention=False, overlap=0.0)
    score = evaluate(_scheduled("1f1b-flush", 18, ("a", (0, 1, 2), 6), ("bc", (3,), 1)), slow)
    assert score.batch is not None
    # Nothing hides the all-reduce of the first stage, over both levels; 18 · 4.5 s of the second follow.
    assert score.batch.exposed_s > 0
    assert score.batch.total_s == pytest.approx(score.batch.exposed_s + 6 + 7.5 + 81)
    score = evaluate(_scheduled("1f1b-flush", 18, ("a", (0, 1), 9), ("bc", (2, 3), 1)), slow)
    assert score.batch is not None
    # One link takes 18 messages of 4 s, after the first pass of 6 s and the all-reduce of 0.5 s.
    assert score.batch.bound == "traffic from stage 1 to stage 2"
    assert score.batch.total_s == pytest.approx(0.5 + 6 + 72)


def test_gpipe_takes_no_less_than_other_flushes_and_holds_all_minibatches() -> None:
    stages = ("a", (0, 1), 2), ("bc", (2, 3), 2)
    step_times = []
    for schedule in ("gpipe", "1f1b-flush"):
        problem = _problem(schedule=schedule, accumulate=4, contention=False, boundary="parallel")
        step_times.append(evaluate(_scheduled(schedule, 4, *stages), problem).step_time_s)
    assert step_times[0] == step_times[1]
    problem = _problem(schedule="gpipe", accumulate=4, contention=False, boundary="parallel")
    too_shallow = evaluate(_scheduled("gpipe", 4, ("a", (0, 1), 1), ("bc", (2, 3), 2)), problem)
    assert too_shallow.step_time_s == float("inf")


def test_a_stage_covers_what_is_in_flight_behind_it_and_transfers_where_memory_allows() -> None:
    problem = _problem(schedule="1f1b-flush", accumulate=9, contention=False, memory=False)
    plan = _scheduled("1f1b-flush", 9, ("a", (0,), 1), ("bc", (2,), 1))
    # One in flight here and one at the next stage leave none for this one.
    assert evaluate(plan, problem).step_time_s == float("inf")
    enough = replace(plan, stages=(replace(plan.stages[0], depth=2), plan.stages[1]))
    assert evaluate(enough, problem).step_time_s < 10
    # A second one is on its way while the first stage takes 6 s and transfers 2 · 4.25.
    assert depths.assign_depths(plan, problem, 1.0).stages[0].depth == 4
    tight = replace(problem.options, memory=True)
    device = replace(problem.cluster.device, memory_bytes=395 + 2 * 45)
    small = replace(problem, options=tight, cluster=replace(problem.cluster, device=device))
    assert depths.assign_depths(plan, small, 1.0).stages[0].depth == 2


def test_two_buffers_synchronise_once_for_all_that_they_accumulate() -> None:
    problem = _problem(schedule="2bw", accumulate=12)
    plan = _scheduled("2bw", 12, ("a", (0, 1), 2), ("bc", (2,), 1))
    score = evaluate(depths.assign_depths(plan, problem, 4.5), problem)
    assert score.stages[0].synchronisation_s == pytest.approx(0.5 / 12)
    # Two versions and a gradient with its state, for three minibatches in flight.
    assert score.stages[0].memory_bytes == pytest.approx(50 * 2 + 70 + 50 + 2 * 50 + 3 * (5 + 40))
    few = replace(depths.assign_depths(plan, problem, 4.5), accumulate=5)
    assert evaluate(few, problem).step_time_s == float("inf")
    with pytest.raises(InputError, match="needs a number of minibatches per update"):
        evaluate(replace(plan, accumulate=None), problem)


def test_vertical_sync_keeps_more_versions_behind_than_stashing() -> None:
    plan = _scheduled("vertical-sync", None, ("a", (0, 1), 3), ("bc", (2,), 1))
    assert [plan.versions(index) for index in (0, 1)] == [4, 8]
    stashing = replace(plan, schedule="1f1b-stashing")
    more = evaluate(plan, _problem()).stages[1].memory_bytes - evaluate(stashing, _problem()).stages[1].memory_bytes
    assert more == pytest.approx(7 * 120)


@pytest.mark.parametrize("schedule", ["1f1b-stashing", "vertical-sync", "2bw", "gpipe", "1f1b-flush"])
def test_recomputation_trades_a_forward_pass_for_memory(schedule: str) -> None:
    problem = _problem(schedule=schedule, accumulate=8)
    plan = depths.assign_depths(_plan(("ab", (0,), 1), ("c", (1,), 1)), problem, 20.0)
    again = replace(plan, stages=(replace(plan.stages[0], recompute=True), plan.stages[1]))
    before, after = evaluate(plan, problem).stages[0], evaluate(again, problem).stages[0]
    assert (after.forward_s, after.backward_s - before.backward_s) == (before.forward_s, pytest.approx(3.0))
    # Nothing is received at the first stage: of what is saved and sent one minibatch's remains.
    depth = plan.stages[0].depth
    assert before.memory_bytes - after.memory_bytes == pytest.approx((depth - 1) * (12 + 48))


def test_copies_take_their_share_of_a_batch() -> None:
    problem = _problem(schedule="1f1b-flush", accumulate=5, contention=False)
    stages = (Stage(("a",), (0, 2), 3, 1), Stage(("b", "c"), (1, 3), 1, 1))
    score = evaluate(Plan(stages, copies=2, schedule="1f1b-flush", accumulate=5), problem)
    assert score.batch is not None
    assert score.batch.minibatches == 3
    # The second stage, with two of 4.5 s after the first. All its 120 bytes are reduced between the two
    # copies, in part after its last backward pass.
    assert score.batch.steady_s == pytest.approx(9)
    assert score.batch.exposed_s == pytest.approx(120 / 10 + 0.5 - 3)
    assert score.step_time_s == pytest.approx(score.batch.total_s / 5)


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
