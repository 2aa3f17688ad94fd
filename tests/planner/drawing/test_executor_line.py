"""`pipeplan solve` says so where a small model is best on fewer workers than there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import NO_COSTS, ExecutorCosts
from pipeplan.cost.evaluate import evaluate
from pipeplan.drawing.executor_line import executor_lines
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

SMALL = Profile(
    layers=(Layer("a", 1e-3, 1e-3, 1000, 0), Layer("b", 1e-3, 1e-3, 1000, 0)),
    tensors=(Tensor("t", "a", ("b",), 1000, 1000),),
    minibatch=1,
)
THREE = Cluster("three", Device("cpu", "cpu", 2**30, cores=1.5), (Level("server", 3, 1e9),))


@pytest.mark.parametrize(("costs", "busy", "says"), [(NO_COSTS, 2, 0), (ExecutorCosts(pass_s=2e-3), 1, 1)])
def test_a_small_model_gets_one_process_where_the_executor_costs_more(
    costs: ExecutorCosts, busy: int, says: int
) -> None:
    problem = Problem(SMALL, replace(THREE, executor=costs), Options(max_replicas=1))
    plan = solve(problem, Settings(solver="dp", simulate=False)).plan
    assert plan.busy == busy
    lines = executor_lines(plan, evaluate(plan, problem), problem)
    assert len(lines) == says
    assert all("1 of 3 workers" in line and "4 ms" in line for line in lines)
