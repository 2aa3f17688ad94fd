"""Plans of one stage wait for their update; where that makes them worse than the solvers take them for, the answer is
still the best of all plans, and proven."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from checking import changed, findings, written
from long_chains import chain

from pipeplan.checker import data_parallel as checker
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost import ddp_overlap
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE, evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.solvers.result import Status
from pipeplan_launch.comm import buckets

MIB = 2**20
QUICK = Settings("dp", certify=False, simulate=False, compare=False)
"""The plan and its step time by the formulas, and nothing beside them."""


def _problem(seed: int, overlap: float = 1.0, *, equal: bool = True) -> Problem:
    """A chain whose gradients take about as long as its computing; nothing else is slow."""
    rng = random.Random(seed)
    layers = [Layer(f"l{index}", rng.random(), 2 * rng.random(), rng.randint(1, 60) * MIB, 0) for index in range(4)]
    device, inside = Device("d", "cuda", 2**40), Level("server", 4, rng.choice([40.0, 80.0, 160.0]) * MIB)
    cluster = Cluster("t", device, (inside,))
    if not equal:
        machines = [Server(replace(device, speed=speed), replace(inside, count=2)) for speed in (1.0, 1.5)]
        cluster = Cluster.of_servers("t", machines, [Level("cluster", 2, 80.0 * MIB)])
    return Problem(chain(layers, 1000), cluster, Options(overlap=overlap))


def _all_plans(problem: Problem) -> Iterator[Plan]:
    """Every way to cut the chain and to hand consecutive workers to the stages, at depths that do not limit."""
    names, total = problem.layer_names, problem.cluster.workers
    for count in range(1, total + 1):
        depths = [100 ** (count - number) for number in range(1, count + 1)]
        for cuts in itertools.combinations(range(1, len(names)), count - 1):
            edges = itertools.pairwise([0, *cuts, len(names)])
            parts = [tuple(names[start:stop]) for start, stop in edges]
            for marks in itertools.combinations(range(total + 1), count + 1):
                runs = [tuple(range(*run)) for run in itertools.pairwise(marks)]
                stages = zip(parts, runs, depths, strict=True)
                yield Plan(tuple(Stage(part, run, depth, 1) for part, run, depth in stages))


def _binds(problem: Problem) -> bool:
    bare = solve(replace(problem, options=replace(problem.options, contention=False)), QUICK)
    score = evaluate(bare.plan, problem)
    return ddp_overlap.waits_for_allreduce(bare.plan) and score.bound == WAITS_FOR_UPDATE


@pytest.mark.parametrize("equal", [True, False])
def test_the_best_of_all_plans_is_found_and_proven(equal: bool) -> None:
    seeds = [seed for seed in range(12 if equal else 23) if _binds(_problem(seed, equal=equal))]
    assert len(seeds) >= 3, "chosen so that waiting matters"
    kinds = set()
    for seed in seeds:
        outcome = solve(_problem(seed, equal=equal), QUICK)
        kinds.add(len(outcome.plan.stages) == 1)
        least = min(evaluate(plan, outcome.problem).step_time_s for plan in _all_plans(outcome.problem))
        assert outcome.objective_s == pytest.approx(least, rel=1e-9)
        assert outcome.results[0].status == Status.OPTIMAL, outcome.verdict.text
        assert outcome.gap < 1e-9
    assert kinds == {True, False} or not equal, "some stay with one stage, some do not"


def test_the_proof_of_one_stage_is_checked() -> None:
    """Where it is the best: also that no other number of workers does better, and that no state is left out."""
    outcomes = (solve(_problem(seed), Settings("dp", simulate=False)) for seed in range(12))
    outcome = next(one for one in outcomes if one.evaluation.bound == WAITS_FOR_UPDATE)
    document, profile = written(outcome), outcome.problem.profile
    assert findings(document, profile)["optimality"].holds
    bound_s = document["certificate"]["bound_s"] * 1.1
    greedy = changed(document, lambda d: d["certificate"].update(bound_s=bound_s))
    assert not findings(greedy, profile)["optimality"].holds
    exposed_s = document["prediction"]["stages"][0]["exposed_sync_s"] * 1.01
    wrong = changed(document, lambda d: d["prediction"]["stages"][0].update(exposed_sync_s=exposed_s))
    assert not findings(wrong, profile)["stages"].holds


def test_buckets_close_where_those_of_the_executor_do() -> None:
    planned = ddp_overlap.FIRST_BUCKET_BYTES, ddp_overlap.BUCKET_BYTES
    checked = checker.FIRST_BUCKET_BYTES, checker.BUCKET_BYTES
    assert planned == checked == (buckets.FIRST_BUCKET_BYTES, buckets.BUCKET_BYTES)


def test_nothing_waits_where_nothing_overlaps() -> None:
    """On CPUs all of the all-reduce is exposed by either formula."""
    for seed in range(6):
        problem = _problem(seed, overlap=0.0)
        score = evaluate(Plan((Stage(problem.layer_names, (0, 1, 2, 3), 1, 1),)), problem)
        assert score.step_time_s == pytest.approx(score.alone_s)
        assert score.bound != WAITS_FOR_UPDATE


def test_copies_of_one_stage_count_where_replicas_are_limited() -> None:
    """Two replicas at most in a copy: four workers can still be used, as two copies of two."""
    layers = [Layer(f"l{index}", 1.0, 2.0, 60 * MIB, 0) for index in range(2)]
    levels = (Level("server", 2, 400.0 * MIB), Level("cluster", 2, 200.0 * MIB))
    cluster = Cluster("t", Device("d", "cuda", 2**50), levels)
    problem = Problem(chain(layers, 10**10), cluster, Options(max_replicas=2))
    outcome = solve(problem, Settings("dp", simulate=False))
    assert (outcome.plan.config, len(outcome.plan.stages)) == ("2×(2)", 1)
    assert outcome.evaluation.bound == WAITS_FOR_UPDATE
    assert outcome.bound_s <= outcome.objective_s * (1 + 1e-9)
    assert findings(written(outcome), problem.profile)["optimality"].holds
