"""Plans whose workers run several stages each: formula, simulation, memory, and what the search finds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from extents import slow_but_for
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError, InputError, NotFoundInTimeError
from pipeplan.plan.plan import Plan
from pipeplan.planning.figure import by_updates_s, lengths_of_updates
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.planning.virtual_stages.virtual_cuts import VirtualShape, cuts_to_try
from pipeplan.planning.virtual_stages.virtual_search import plan_at, search_virtual
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.rendering.plan_folder import write_plan
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.scenario import read_scenario
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan_launch.plan.stage_files import load_plan

INTERLEAVED, ZERO = "interleaved-1f1b", "zb-v"


def problem_of(
    times: Sequence[tuple[float, float]], schedule: str, accumulate: int, workers: int, **more: Any
) -> Problem:
    """A chain of layers with these forward and backward times, 100 bytes of parameters and 10 saved each."""
    memory, size = more.pop("memory_bytes", 10**12), more.pop("message_bytes", 0)
    layers = [Layer(f"l{number}", *pair, 100, 10) for number, pair in enumerate(times)]
    profile = chain(layers, size, model_ref="m:f", graph_hash="sha256:0")
    cluster = Cluster("c", Device("d", "cuda", memory), (Level("server", workers, 1e9),))
    return Problem(profile, cluster, Options(schedule=schedule, accumulate=accumulate, **more))


def batch_times(problem: Problem, plan: Plan) -> tuple[float, float]:
    """(predicted, simulated) seconds of one update."""
    score = evaluate(plan, problem)
    assert plan.accumulate is not None
    simulated = simulate_schedule(scenario_of_plan(plan, problem, score), plan.accumulate).end_s
    return score.step_time_s * plan.accumulate, simulated


@pytest.mark.parametrize(("schedule", "chunks"), [(INTERLEAVED, 2), (INTERLEAVED, 3), (ZERO, 2)])
def test_equal_stages_take_the_time_of_the_paper(schedule: str, chunks: int) -> None:
    for devices, rounds in itertools.product((2, 4, 8), (2, 3)):
        accumulate, stages = devices * rounds, devices * chunks
        problem = problem_of([(1.0, 2.0)] * stages, schedule, accumulate, devices)
        plan = plan_at(problem, VirtualShape(schedule, devices, chunks, 1), tuple(range(1, stages)))
        bubble = (devices - 1) * (3.0 if schedule == INTERLEAVED else 1.0)  # of F + B, or of F alone
        expected = accumulate * chunks * 3.0 + bubble
        predicted, simulated = batch_times(problem, plan)
        assert simulated == pytest.approx(expected, rel=1e-12)
        # Under zb-v the next update may begin while others still compute gradients of weights.
        assert predicted == pytest.approx(expected if schedule == INTERLEAVED else expected - bubble, rel=1e-12)


@pytest.mark.parametrize("count", slow_but_for([20], [20, 400]))
def test_the_prediction_of_unequal_stages_is_what_a_simulation_takes(count: int) -> None:
    chance = random.Random(count)
    for _ in range(count):
        schedule, devices, replicas = chance.choice([INTERLEAVED, ZERO]), chance.randint(1, 6), chance.randint(1, 2)
        chunks = 2 if schedule == ZERO else chance.randint(2, 4)
        shape = VirtualShape(schedule, devices, chunks, replicas)
        accumulate = replicas * chance.randint(1, 20)
        times = [(chance.uniform(0.5, 1.5), chance.uniform(0.5, 3)) for _ in range(chance.randint(shape.stages, 40))]
        problem = problem_of(times, schedule, accumulate, devices * replicas, contention=False, overlap=1.0)
        for places in cuts_to_try(problem, shape, accumulate // replicas):
            predicted, simulated = batch_times(problem, plan_at(problem, shape, places))
            # Replicas make an all-reduce of a microsecond.
            assert predicted <= simulated * (1 + 1e-9)
            if schedule == INTERLEAVED:
                assert predicted == pytest.approx(simulated, rel=1e-6)


def test_the_search_takes_all_workers_and_beats_one_stage_each() -> None:
    times = [(1.0, 2.0)] * 16
    found = search_virtual(problem_of(times, ZERO, 8, 4, max_replicas=1)).plans[0]
    assert found.plan.config == "1-1-1-1 × 2 stages"
    assert found.score.step_time_s * 8 == pytest.approx(8 * 12, rel=1e-9)
    # Every worker goes on with the next update when its own is done, so nobody waits in the steady state.
    assert found.step_s * 8 == pytest.approx(8 * 12, rel=1e-9)
    outcome = solve(problem_of(times, INTERLEAVED, 8, 4, virtual_stages=4, max_replicas=1), Settings(time_limit_s=20))
    assert outcome.plan.config == "1-1-1-1 × 4 stages"
    assert outcome.evaluation.step_time_s * 8 == pytest.approx(8 * 12 + 3 * 3.0, rel=1e-9)
    flushing = next(one for one in outcome.baselines if one.name == "best plan of 1f1b-flush")
    assert flushing.step_time_s is not None
    assert outcome.evaluation.step_time_s < flushing.step_time_s


def test_no_cuts_of_a_small_model_are_faster() -> None:
    """Links that messages crowd decide, which the formulas hardly charge, so every list of cuts is simulated."""
    chance, misled = random.Random(5), 0
    for _ in range(6):
        times = [(chance.choice([1e-3, 4e-3]), chance.choice([2e-3, 8e-3])) for _ in range(6)]
        sizes = [chance.choice([10**4, 10**6, 10**7]) for _ in range(5)]
        problem = problem_of(times, ZERO, 6, 2, message_bytes=sizes, max_replicas=1)
        cuts = itertools.combinations(range(1, 6), 3)
        plans = [plan_at(problem, VirtualShape(ZERO, 2, 2, 1), places) for places in cuts]
        scored = [(evaluate(plan, problem).step_time_s, _simulated_s(plan, problem)) for plan in plans]
        misled += min(scored)[1] > min(time for _, time in scored) * 1.001
        found = search_virtual(problem).plans[0]
        assert found.step_s <= min(time for _, time in scored) * (1 + 1e-9)
    assert misled


def _simulated_s(plan: Plan, problem: Problem) -> float:
    scenario = scenario_of_plan(plan, problem, evaluate(plan, problem))
    lengths = lengths_of_updates(scenario, plan)
    assert lengths is not None
    return by_updates_s(scenario, lengths, NO_DEADLINE)


def test_memory_is_that_of_all_stages_of_a_worker_and_decides_what_recomputes() -> None:
    """Weights, gradients and as much optimiser state: 3 × 100 bytes a layer; activations of 10 bytes a layer."""
    times = [(1.0, 2.0)] * 8
    problem = problem_of(times, INTERLEAVED, 8, 2)
    plan = plan_at(problem, VirtualShape(INTERLEAVED, 2, 2, 1), (2, 4, 6))
    # The first device holds 2 (p - 1) + (v - 1) p + 1 = 5 minibatches of two layers.
    assert [cost.memory_bytes for cost in evaluate(plan, problem).stages] == [1300, 1260, 1300, 1260]
    tight = search_virtual(problem_of(times, INTERLEAVED, 8, 2, virtual_stages=2, memory_bytes=1270)).plans[0]
    assert any(stage.recompute for stage in tight.plan.stages)
    with pytest.raises(InfeasibleError, match="no plan of interleaved-1f1b fits in memory"):
        search_virtual(problem_of(times, INTERLEAVED, 8, 2, virtual_stages=2, memory_bytes=1270, recompute=False))


def test_what_cannot_be_is_refused_in_one_line() -> None:
    times = [(1.0, 2.0)] * 8
    pins = (("l2", 1), ("l3", 2), ("l6", 4))
    found = search_virtual(problem_of(times, ZERO, 8, 2, pins=pins, stages=4)).plans[0].plan
    assert len(found.stages[0].layers) == 3
    assert found.stages[-1].layers[0] in ("l5", "l6"), "pins decide where it is cut"
    with pytest.raises(InputError, match="--pin also needs the number of stages"):
        search_virtual(problem_of(times, ZERO, 8, 2, pins=pins))
    with pytest.raises(InfeasibleError, match="at least two workers and 4 layers to cut between"):
        search_virtual(problem_of(times[:3], ZERO, 8, 2))
    with pytest.raises(InputError, match="virtual stages are those of a worker under interleaved-1f1b"):
        problem_of(times, ZERO, 8, 2, virtual_stages=2)
    with pytest.raises(InputError, match="leave out --grid"):
        search_virtual(problem_of(times, ZERO, 8, 2, grid=True))
    with pytest.raises(NotFoundInTimeError, match="no plan was found in time"):
        search_virtual(problem_of(times, ZERO, 8, 2), Deadline.after(-1.0))


@pytest.mark.parametrize("schedule", [INTERLEAVED, ZERO])
def test_the_executor_reads_the_plan(tmp_path: Path, schedule: str) -> None:
    problem = problem_of([(1.0, 2.0)] * 12, schedule, 5, 4, max_replicas=2)
    outcome = solve(problem, Settings(time_limit_s=20))
    write_plan(outcome, tmp_path / "plan")
    launched = load_plan(tmp_path / "plan")
    assert [stage.workers for stage in launched.pipeline] == [stage.workers for stage in outcome.plan.stages]
    assert launched.schedule.name == schedule
    assert read_scenario(tmp_path / "plan").shapes == launched.shapes
