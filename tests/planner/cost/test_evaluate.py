"""The evaluator on plans worked out by hand, what it refuses, and the reserve of a device's memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from long_chains import chain

import pipeplan
from pipeplan.cluster_data.cluster import MEMORY_RESERVE, Cluster, Device, Level, Server
from pipeplan.cost import depths, formulas
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
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
    options = {"contention": False} | options
    return Problem(profile, Cluster("t", Device("d", "cpu", 1000), levels), Options(**options))


def _plan(*stages: tuple[str, tuple[int, ...], int], schedule: str = "1f1b-stashing", accumulate: int = 0) -> Plan:
    made = tuple(Stage(tuple(layers), workers, depth, depth) for layers, workers, depth in stages)
    return Plan(made, schedule=schedule, accumulate=accumulate or None)


def test_a_plan_over_two_servers_by_hand() -> None:
    score = evaluate(_plan(("a", (0, 1, 2), 3), ("bc", (3,), 1)), _problem())
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


def test_too_small_a_depth_bounds_the_step_time() -> None:
    score = evaluate(_plan(("ab", (0,), 2), ("c", (3,), 1)), _problem())
    # Two in flight, one of them at the next stage: none is left for the transfers, which take 2 · (4.8 + 0.25) s.
    assert score.stages[0].depth_s > 1e6
    assert score.bound == "minibatches in flight at stage 1"
    assert evaluate(_plan(("ab", (0,), 3), ("c", (3,), 1)), _problem()).stages[0].depth_s == pytest.approx(10.1)


def test_no_overlap_adds_synchronisation_and_inference_costs_the_forward_pass_only() -> None:
    plan = _plan(("abc", (0, 1), 1))
    together, apart = evaluate(plan, _problem()), evaluate(plan, _problem(overlap=0.0))
    stage = together.stages[0]
    assert apart.step_time_s == pytest.approx(stage.compute_s + stage.synchronisation_s)
    assert together.step_time_s == pytest.approx(max(stage.compute_s, stage.synchronisation_s))
    plan = replace(_plan(("a", (0,), 1), ("bc", (1,), 1)), inference=True)
    score = evaluate(plan, _problem(inference=True))
    assert score.step_time_s == pytest.approx(2.0)
    assert [stage.boundary_gradient_bytes for stage in score.stages] == [0, 0]
    assert score.stages[0].memory_bytes == pytest.approx(50 + 40)


def test_a_batch_with_a_flush_by_hand() -> None:
    """5 minibatches on a | bc, two replicas and one: 3 rounds at the first stage, 5 at the second."""
    problem = _problem(schedule="1f1b-flush", accumulate=5)
    plan = _plan(("a", (0, 1), 3), ("bc", (2,), 1), schedule="1f1b-flush", accumulate=5)
    score = evaluate(plan, problem)
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


def test_two_buffers_synchronise_once_for_all_that_they_accumulate() -> None:
    problem = _problem(schedule="2bw", accumulate=12)
    plan = _plan(("a", (0, 1), 2), ("bc", (2,), 1), schedule="2bw", accumulate=12)
    deep = depths.assign_depths(plan, problem, 4.5)
    score = evaluate(deep, problem)
    assert score.stages[0].synchronisation_s == pytest.approx(0.5 / 12)
    # Two versions and a gradient with its state, for three minibatches in flight.
    assert score.stages[0].memory_bytes == pytest.approx(50 * 2 + 70 + 50 + 2 * 50 + 3 * (5 + 40))
    assert evaluate(replace(deep, accumulate=5), problem).step_time_s == float("inf")
    with pytest.raises(InputError, match="needs a number of minibatches per update"):
        evaluate(replace(plan, accumulate=None), problem)
    # 12 minibatches per update, 3 on each of 2 replicas in flight, and an all-reduce of 10 s: at the step time where
    # both are equal, 6 and what passes during it make 12. In two copies the last one may be half a step time later.
    step_time_s = formulas.buffered_step_time(3, 2, 10.0, 12)
    assert 6 + 10.0 / step_time_s - 1 == pytest.approx(12)
    step_time_s = formulas.buffered_step_time(2, 2, 10.0, 6, copies=2)
    assert 4 + 10.0 / step_time_s - 1 / 2 == pytest.approx(6)
    assert (formulas.buffered_step_time(7, 2, 0.0, 12), formulas.buffered_step_time(6, 2, 0.0, 12)) == (math.inf, 0.0)


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


def test_what_is_no_plan_is_refused() -> None:
    for plan, complaint in (
        (_plan(("ab", (0,), 1)), "'c' is in only one"),
        (_plan(("abc", (0,), 1), ("c", (1,), 1)), "'c' in two stages"),
        (_plan(("b", (0,), 1), ("ac", (1,), 1)), "puts 'b' before"),
        (_plan(("ab", (0, 1), 1), ("c", (1,), 1)), "one worker to two stages"),
        (_plan(("abc", (4,), 1)), "uses worker 4, but the cluster has workers 0 to 3"),
        (_plan(("abc", (), 1)), "needs a worker"),
    ):
        with pytest.raises(InputError, match=complaint):
            evaluate(plan, _problem())
    problem = _problem()
    tied = Problem(replace(problem.profile, together=(("a", "c"),)), problem.cluster)
    assert [unit.layers for unit in tied.units] == [("a", "b", "c")], "with what lies between"
    with pytest.raises(InputError, match="must share a stage"):
        evaluate(_plan(("ab", (0,), 2), ("c", (1,), 1)), tied)
    for options, complaint in (
        ({"stages": 5}, "5 stages asked for, but the model has only 3"),
        ({"overlap": 1.5}, "between 0 and 1"),
        ({"max_replicas": 0}, "at least 1"),
    ):
        with pytest.raises(InputError, match=complaint):
            _problem(**options)


# The reserve of a device's memory: a device with a reserve is planned for as one with only the rest.

PROFILE = chain([Layer(f"l{i}", 1.0, 2.0, size, size) for i, size in enumerate((100, 300, 250, 200))], 10)
WHOLE, REST, RESERVE = 3200, 2400, 0.25
"""Bytes of a device, with and without its reserve: the plans of the two differ."""


def _cluster(memory: int, reserve: float, *, differ: bool) -> Cluster:
    device = Device("chip", "cuda", memory, memory_reserve=reserve)
    inside, above = Level("server", 2, 1e3), Level("cluster", 2, 1e2)
    if not differ:
        return Cluster("small", device, (inside, above))
    faster = replace(device, name="fast", speed=2.0)
    return Cluster.of_servers("mixed", [Server(device, inside), Server(faster, inside)], [above])


def _solved(cluster: Cluster, solver: str) -> Outcome:
    settings = Settings(solver=solver, certify=False, simulate=False, time_limit_s=None)
    return pipeplan.solve(PROFILE, cluster, settings=settings, schedule="1f1b-flush", batch=8, microbatch=1)


@pytest.mark.parametrize("solver", ["dp", "ilp"])
@pytest.mark.parametrize("differ", [False, True])
def test_a_reserve_leaves_the_rest_to_plan_with(solver: str, differ: bool) -> None:
    reserved, smaller, whole = (
        _solved(_cluster(size, reserve, differ=differ), solver)
        for size, reserve in ((WHOLE, RESERVE), (REST, 0.0), (WHOLE, 0.0))
    )
    assert reserved.plan == smaller.plan != whole.plan
    assert {stage.capacity_bytes for stage in reserved.evaluation.stages} == {REST}


def test_the_usual_reserve_and_a_layer_that_needs_it() -> None:
    for cluster in (pipeplan.cluster("A"), pipeplan.cluster("local")):
        assert cluster.device.memory_reserve == MEMORY_RESERVE
        assert cluster.memory_of([0]) == int(cluster.device.memory_bytes * 0.95)
    with pytest.raises(pipeplan.InfeasibleError, match="more than the 768 B of one chip"):
        _solved(_cluster(1024, RESERVE, differ=False), "dp")
