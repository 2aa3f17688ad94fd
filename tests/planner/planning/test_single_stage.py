"""Plans of one stage wait for their update; where that makes them worse than the solvers take them for, the answer is
still the best of all plans, and proven."""

from __future__ import annotations

import random

from checking import changed, findings, written
from long_chains import chain

from pipeplan.checker import data_parallel as checker
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost import ddp_overlap
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan_launch.comm import buckets

MIB = 2**20


def _problem(seed: int, overlap: float = 1.0) -> Problem:
    """A chain whose gradients take about as long as its computing; nothing else is slow."""
    rng = random.Random(seed)
    layers = [Layer(f"l{n}", rng.random(), 2 * rng.random(), rng.randint(1, 60) * MIB, 0) for n in range(4)]
    levels = (Level("server", 4, rng.choice([40.0, 80.0, 160.0]) * MIB),)
    return Problem(chain(layers, 1000), Cluster("t", Device("d", "cuda", 2**40), levels), Options(overlap=overlap))


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
