"""The plans that are listed: all of a small problem, with bounds that hold, and uniform ones of unequal servers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.schedules import FLUSH, ZERO_BUBBLE
from pipeplan.planning.figure import figure_of
from pipeplan.planning.listed_plans import _Listing, listed_plans, uniform_plans
from pipeplan.planning.local_search import PlanSearch
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.util.deadline import NO_DEADLINE

TIMES = (1.0, 3.0, 2.0, 2.5)
FOUR = Cluster("four", Device("chip", "cuda", 10**6), (Level("server", 2, 1e3), Level("cluster", 2, 5e2)))


def _problem(cluster: Cluster = FOUR, **options: object) -> Problem:
    layers = tuple(Layer(f"l{number}", time, 2 * time, 1000, 10) for number, time in enumerate(TIMES))
    tensors = tuple(Tensor(f"t{one}", f"l{one}", (f"l{two}",), 50, 50) for one, two in pairwise(range(len(TIMES))))
    fields = {"schedule": FLUSH, "accumulate": 4} | options
    return Problem(Profile(layers, tensors, 1), cluster, Options(**fields))  # type: ignore[arg-type]


def test_a_small_problem_has_all_of_its_shapes_and_keeps_its_options() -> None:
    problem = _problem()
    shapes = {plan.config for plan in listed_plans(problem, math.inf) if plan.copies == 1}
    assert {"1", "4", "1-1", "3-1", "1-3", "2-2", "1-2-1", "1-1-1-1"} <= shapes
    assert {plan.copies for plan in listed_plans(problem, math.inf)} == {1, 2}
    held = _problem(stages=2, max_replicas=1, max_workers=3)
    assert {plan.config for plan in listed_plans(held, math.inf)} == {"1-1"}
    starts = {plan.stages[1].workers for plan in listed_plans(problem, math.inf) if plan.config == "1-2"}
    assert starts == {(1, 2), (2, 3)}, "behind the first stage, or in the next server"


@pytest.mark.parametrize("schedule", [FLUSH, ZERO_BUBBLE])
def test_the_bound_of_a_listed_plan_is_never_above_its_score(schedule: str) -> None:
    problem = _problem(schedule=schedule, memory=False)
    seen = 0
    for space in plan_spaces(problem):
        listing = _Listing(problem, space, math.inf)
        for bound_s, _, parts in listing.plans():
            plan = depths.assign_depths(listing.plan(parts), problem, 0.0)
            assert bound_s <= evaluate(plan, problem).step_time_s * (1 + 1e-9), plan.config
            seen += 1
    assert seen > 30


def test_the_first_plans_of_all_shapes_come_before_their_second_ones() -> None:
    configs = [plan.config for plan in listed_plans(_problem(), math.inf) if plan.copies == 1]
    first_repeated = next(number for number, one in enumerate(configs) if one in configs[:number])
    assert set(configs[:first_repeated]) >= {"1-1-1-1", "4", "1-1"}


def test_uniform_plans_have_equal_replicas_on_each_kind_of_device() -> None:
    devices = [Device(name, "cuda", 10**6, speed=speed) for name, speed in (("slow", 0.5), ("fast", 1.0))]
    servers = [Server(device, Level("server", 2, 1e3)) for device in devices]
    plans = list(uniform_plans(_problem(Cluster.of_servers("mixed", servers, (Level("cluster", 2, 5e2),)))))
    assert {plan.config for plan in plans} == {"1-1", "2", "1-1-2", "2-2", "2-1-1", "1-1-1-1"}
    assert not list(uniform_plans(_problem())), "of equal servers the dynamic program finds them"
    even = next(plan for plan in plans if plan.config == "2-2")
    assert [len(stage.layers) for stage in even.stages] == [1, 3], "half of the work takes the slow server longer"


def test_the_search_of_listed_plans_finds_the_best_of_them() -> None:
    problem = _problem(memory=False)
    search = PlanSearch(problem, NO_DEADLINE)
    best = search.listed(math.inf)
    assert best is not None
    for plan in listed_plans(problem, math.inf):
        deep = depths.assign_depths(plan, problem, 0.0)
        score = evaluate(deep, problem)
        if score.step_time_s < best.step_s:
            assert figure_of(deep, score, problem, NO_DEADLINE).step_s >= best.step_s * (1 - 1e-9), deep.config
