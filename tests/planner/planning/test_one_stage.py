"""The bound on plans of one stage is the figure of the fastest of them, wherever they lie."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.figure import figured
from pipeplan.planning.local_search import with_depths
from pipeplan.planning.one_stage import one_stage_bound_s
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.util.deadline import NO_DEADLINE, Deadline


def _problem(rng: random.Random, *, alike: bool) -> Problem:
    """A chain on two servers, of equal devices or of two kinds."""
    device = Device("chip", "cuda", rng.choice([2 * 10**9, 10**10]))
    slower = Device("old chip", "cuda", 10**10, speed=rng.choice([0.3, 0.7]))
    levels = Level("server", 3, rng.choice([1e9, 1e10]), 1e-5), Level("cluster", 2, rng.choice([1e8, 1e9]), 5e-5)
    servers = () if alike else (Server(device, levels[0]), Server(slower, levels[0]))
    layers = (
        Layer(f"l{number}", rng.choice([1e-3, 4e-3]), rng.choice([2e-3, 8e-3]), rng.choice([10**6, 10**8]), 10**6)
        for number in range(rng.randint(3, 6))
    )
    options = Options(schedule="1f1b-flush", accumulate=12)
    return Problem(chain(layers, 10**5), Cluster("drawn", device, levels, machines=servers), options)


def _figures(problem: Problem) -> Iterator[float]:
    """The figures of all plans of one stage on consecutive workers."""
    workers = problem.cluster.workers
    for first, last in itertools.combinations_with_replacement(range(workers), 2):
        stage = Stage(problem.layer_names, tuple(range(first, last + 1)), 1, 1)
        if (fitting := with_depths(Plan((stage,)), problem)) is not None:
            yield figured(*fitting, problem, NO_DEADLINE).step_s


@pytest.mark.parametrize("alike", [True, False])
def test_no_plan_of_one_stage_is_faster_than_the_bound(alike: bool) -> None:
    bounded = 0
    for seed in range(12):
        problem = _problem(random.Random(seed), alike=alike)
        figures = list(_figures(problem))
        least_s = min(figures, default=math.inf)
        assert one_stage_bound_s(problem, math.inf, NO_DEADLINE) == pytest.approx(least_s, rel=1e-9)
        limit_s = min(least_s, 1.0) * 0.9
        assert one_stage_bound_s(problem, limit_s, NO_DEADLINE) == limit_s
        bounded += least_s < math.inf
    assert bounded > 6


def test_without_time_the_bound_is_that_of_the_formulas() -> None:
    problem = _problem(random.Random(1), alike=True)
    stages = (Stage(problem.layer_names, tuple(range(count)), 1, 1) for count in range(1, problem.cluster.workers + 1))
    found = [one[0] for stage in stages if (one := with_depths(Plan((stage,)), problem)) is not None]
    formula_s = min(evaluate(plan, problem).step_time_s for plan in found)
    assert one_stage_bound_s(problem, math.inf, Deadline.after(0.0)) == pytest.approx(formula_s, rel=1e-9)
