"""Plans that are listed, improved and compared by their figure: the simplest one within 3% of the fastest is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from long_chains import chain

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.virtual_stages import with_depths
from pipeplan.from_options.option_fields import options_for
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import FLUSH
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.candidates import simplest_of
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.figure import (
    MOST_PASSES_OF_UPDATES,
    TOLERANCE,
    FiguredPlan,
    affordable,
    figure_of,
    figured,
    lengths_of_updates,
)
from pipeplan.planning.listed_plans import listed_plans, uniform_plans
from pipeplan.planning.local_search import LEAST_GAIN, PlanSearch, improve, neighbours
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.simulate import simulated_update_s
from pipeplan.util.deadline import NO_DEADLINE


def _bundled(name: str, cluster: str, **options: object) -> Problem:
    return Problem(pipeplan.read_profile(name), pipeplan.cluster(cluster), options_for("cuda", **options))


def _start(problem: Problem) -> FiguredPlan:
    best, _ = best_in_time(problem, 10_000, NO_DEADLINE)
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
    return Problem(chain(layers, 50), cluster, Options(**fields))


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
    for plan in listed_plans(problem, math.inf):
        deep = depths.assign_depths(plan, problem, 0.0)
        score = evaluate(deep, problem)
        if score.step_time_s < best.step_s:
            assert figure_of(deep, score, problem, NO_DEADLINE).step_s >= best.step_s * (1 - 1e-9), deep.config


# The figure of a plan.


def _flush_plan(*counts: int, first: int = 0, accumulate: int = 4) -> Plan:
    """Stages of one layer on so many workers each."""
    stages = []
    for number, count in enumerate(counts):
        stages.append(Stage((f"l{number}",), tuple(range(first, first + count)), 1, 1))
        first += count
    return Plan(tuple(stages), schedule="1f1b-flush", accumulate=accumulate)


def _twelve(accumulate: int, schedule: str = "1f1b-flush") -> Problem:
    layers = [Layer(f"l{number}", time, 2 * time, 100, 10) for number, time in enumerate((1.0, 3.0, 2.0, 2.5))]
    levels = (Level("server", 4, 100.0), Level("cluster", 3, 50.0))
    options = Options(schedule=schedule, accumulate=accumulate)
    return Problem(chain(layers, 50), Cluster("twelve", Device("chip", "cuda", 10**6), levels), options)


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (1, 3, 2, 3), (2, 4, 3, 3)])
def test_two_short_updates_give_the_time_of_a_long_one(replicas: tuple[int, ...]) -> None:
    problem = _twelve(1000)
    least = depths.assign_depths(_flush_plan(*replicas, accumulate=1000), problem, 1e9)
    plan = depths.assign_depths(least, problem, evaluate(least, problem).step_time_s)
    score = evaluate(plan, problem)
    scenario = scenario_of_plan(plan, problem, score)
    assert affordable(scenario, plan) is None, "the steady state takes too many passes"
    short, longer = lengths_of_updates(scenario, plan)
    assert short < longer
    assert short + longer < 500
    found = figure_of(plan, score, problem, NO_DEADLINE)
    assert found.step_s == pytest.approx(simulated_update_s(scenario) / 1000, rel=0.01)
    assert found.step_s >= score.step_time_s


def test_short_updates_suffice_also_where_workers_have_several_stages() -> None:
    problem = _twelve(MOST_PASSES_OF_UPDATES, "zb-v")
    stages = tuple(Stage((f"l{number}",), (worker,), 1, 1) for number, worker in enumerate((0, 1, 1, 0)))
    plan = with_depths(Plan(stages, schedule="zb-v", accumulate=MOST_PASSES_OF_UPDATES))
    scenario = scenario_of_plan(plan, problem, evaluate(plan, problem))
    assert sum(lengths_of_updates(scenario, plan)) < 100


@dataclass(frozen=True)
class _One:
    plan: Plan
    sample_s: float
    sharding: Sharding = Sharding.NONE
    cluster: Cluster = field(default_factory=lambda: pipeplan.cluster("C"))


def test_the_simplest_plan_within_the_tolerance_is_taken() -> None:
    parallel, uniform, unequal = _flush_plan(4), _flush_plan(2, 2), _flush_plan(3, 1)
    divided = [_One(parallel, 1.021, kind) for kind in (Sharding.FULL, Sharding.OPTIMIZER)]
    found = [_One(unequal, 1.0), _One(uniform, 1.02), *divided, _One(parallel, 1.029)]
    for number in range(len(found), 0, -1):
        assert simplest_of(found[:number]) is found[number - 1], "the order of the kinds"
    fast, slow = _One(unequal, 1.0), _One(parallel, 1.0 + TOLERANCE + 1e-6)
    assert simplest_of([slow, fast]) is fast
    # Fewer workers, fewer stages, and idle workers at the end.
    assert simplest_of([_One(parallel, 1.0), _One(_flush_plan(2), 1.01)]).plan.busy == 2
    assert len(simplest_of([_One(_flush_plan(1, 1, 2), 1.0), _One(unequal, 1.01)]).plan.stages) == 2
    assert simplest_of([_One(_flush_plan(2, first=2), 1.0), _One(_flush_plan(2), 1.001)]).plan.stages[0].workers == (
        0,
        1,
    )


def test_replicas_that_are_equal_on_each_kind_of_device_are_uniform() -> None:
    fast, slow = (Device(name, "cuda", 10**9, speed=speed) for name, speed in (("fast", 1.0), ("slow", 0.5)))
    servers = [Server(device, Level("server", 4, 1e9)) for device in (slow, fast)]
    mixed = Cluster.of_servers("mixed", servers, (Level("cluster", 2, 1e9),))
    uniform, unequal = _One(_flush_plan(2, 2, 4), 1.02, cluster=mixed), _One(_flush_plan(1, 3, 4), 1.0, cluster=mixed)
    assert simplest_of([unequal, uniform]) is uniform
    across = _One(_flush_plan(2, 4, 2), 1.02, cluster=mixed)
    assert simplest_of([unequal, across]) is unequal, "a stage on two kinds of device"
