"""Plans that are listed and plans that are improved: the local search finds what moving one thing finds."""

from __future__ import annotations

import math

from long_chains import chain

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.from_options.option_fields import options_for
from pipeplan.plan.schedules import FLUSH
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.figure import FiguredPlan, figure_of, figured
from pipeplan.planning.listed_plans import listed_plans, uniform_plans
from pipeplan.planning.local_search import LEAST_GAIN, PlanSearch, improve, neighbours
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.util.deadline import NO_DEADLINE


def _bundled(name: str, cluster: str, **options: object) -> Problem:
    return Problem(pipeplan.read_profile(name), pipeplan.cluster(cluster), options_for("cuda", **options))


def _start(problem: Problem) -> FiguredPlan:
    best, _ = best_in_time(problem, 10_000, NO_DEADLINE)
    assert best is not None
    return figured(best.plan, evaluate(best.plan, problem), problem, NO_DEADLINE)


def test_the_result_is_at_least_as_fast_and_no_neighbour_is_faster() -> None:
    for problem in (
        _bundled("vgg16-v100", "A", schedule="1f1b-flush", accumulate=16),
        _bundled("awd-lm-v100", "C", schedule="1f1b-flush", accumulate=8),
        _bundled("s2vt-v100", "C", schedule="1f1b-stashing"),
    ):
        start = _start(problem)
        found = improve(start, problem, NO_DEADLINE)
        assert found.step_s <= start.step_s
        assert found.score.fits
        for plan in neighbours(found, problem):
            try:
                score = evaluate(plan, problem)
            except pipeplan.InputError:
                continue
            if score.fits and score.step_time_s < found.step_s:
                near = figured(plan, score, problem, NO_DEADLINE)
                assert near.step_s >= found.step_s * (1 - LEAST_GAIN) or near.figure.simulated_s is None
    assert improve(start, problem, NO_DEADLINE).plan == found.plan, "the same search gives the same plan"


def test_constraints_hold_for_every_plan_that_is_taken() -> None:
    problem = _bundled("vgg16-v100", "A", schedule="1f1b-flush", accumulate=16, max_replicas=4, max_workers=9)
    found = improve(_start(problem), problem, NO_DEADLINE)
    assert satisfies_options(found.plan, problem)
    assert found.plan.busy <= 9
    problem = _bundled("vgg16-v100", "B", schedule="1f1b-flush", accumulate=16, grid=True)
    found = improve(_start(problem), problem, NO_DEADLINE)
    assert len({stage.replicas for stage in found.plan.stages}) == 1, "a grid stays a grid"


# Plans that are listed.

FOUR = Cluster("four", Device("chip", "cuda", 10**6), (Level("server", 2, 1e3), Level("cluster", 2, 5e2)))


def _problem(cluster: Cluster = FOUR, **options: object) -> Problem:
    layers = [Layer(f"l{number}", time, 2 * time, 1000, 10) for number, time in enumerate((1.0, 3.0, 2.0, 2.5))]
    fields = {"schedule": FLUSH, "accumulate": 4} | options
    return Problem(chain(layers, 50), cluster, Options(**fields))  # type: ignore[arg-type]


def test_a_small_problem_has_all_of_its_shapes_and_keeps_its_options() -> None:
    plans = list(listed_plans(_problem(), math.inf))
    configs = [plan.config for plan in plans if plan.copies == 1]
    assert {"1", "4", "1-1", "3-1", "1-3", "2-2", "1-2-1", "1-1-1-1"} <= set(configs)
    assert {plan.copies for plan in plans} == {1, 2}
    starts = {plan.stages[1].workers for plan in plans if plan.config == "1-2"}
    assert starts == {(1, 2), (2, 3)}, "behind the first stage, or in the next server"
    first_repeated = next(number for number, one in enumerate(configs) if one in configs[:number])
    assert set(configs[:first_repeated]) >= {"1-1-1-1", "4", "1-1"}, "the first plans of all shapes come first"
    held = _problem(stages=2, max_replicas=1, max_workers=3)
    assert {plan.config for plan in listed_plans(held, math.inf)} == {"1-1"}


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
    best = PlanSearch(problem, NO_DEADLINE).listed(math.inf)
    assert best is not None
    for plan in listed_plans(problem, math.inf):
        deep = depths.assign_depths(plan, problem, 0.0)
        score = evaluate(deep, problem)
        if score.step_time_s < best.step_s:
            assert figure_of(deep, score, problem, NO_DEADLINE).step_s >= best.step_s * (1 - 1e-9), deep.config
