"""The simulation beside an answer: it tells where a prediction is off, and decides by a few percent or among equals."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from commandline import Run
from long_chains import long_chain

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.stage_times import plain_data_parallel
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.updates import MOST_STALE, Updates
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.stated import choose, pace
from pipeplan.planning.stated.choose import EQUAL, Rival, choose_by_simulation
from pipeplan.planning.stated.pace import TELLING, PlanSimulation, SimulatedPlan, least_possible_s, simulated
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.rendering.plan_json import plan_document
from pipeplan.simulation import scenario
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan.util.files import Node

PLAIN = Settings(solver="dp", certify=False, simulate=False)


@cache
def _outcome(name: str, cluster: str, **options: object) -> Outcome:
    chosen: dict[str, Any] = {"simplest": 0, "staleness": "any"} | options
    return pipeplan.solve(pipeplan.read_profile(name), pipeplan.cluster(cluster), settings=PLAIN, **chosen)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("vgg16-v100", {}, marks=pytest.mark.slow),
        pytest.param("resnet50-v100", {}, marks=pytest.mark.slow),
        ("awd-lm-v100", {}),
        ("s2vt-v100", {"schedule": "2bw", "accumulate": 32}),
        ("s2vt-v100", {"schedule": "gpipe", "accumulate": 32}),
        ("alexnet-v100", {"inference": True}),
        ("alexnet-v100", {"boundary": "parallel", "contention": False}),
    ],
)
def test_a_plan_in_memory_is_simulated_as_from_its_file(name: str, options: dict[str, object]) -> None:
    outcome = _outcome(name, "B", **options)
    written = json.loads(json.dumps(plan_document(outcome)))
    read = scenario.scenario_from_document(Node(written, "plan.json"))
    assert scenario_of_plan(outcome.plan, outcome.problem, outcome.evaluation) == read


def test_the_answer_states_the_pace_that_the_command_simulates() -> None:
    settings, profile = replace(PLAIN, simulate=True), pipeplan.read_profile("s2vt-v100")
    outcome = pipeplan.solve(profile, pipeplan.cluster("B"), settings=settings, schedule="1f1b-stashing")
    told = outcome.simulation
    steady = pipeplan.simulate(outcome, told.minibatches).report.steady
    assert steady is not None
    assert told.simulated_s == pytest.approx(steady.pace_s)
    assert told.ratio == pytest.approx(steady.pace_s / outcome.objective_s)
    assert told.differs
    assert (told.stated_ratio or 0.0) > 1 + TELLING
    assert plan_document(outcome)["simulation"]["minibatch_s"] == told.simulated_s


def test_among_equal_predictions_the_faster_in_the_simulation_is_taken() -> None:
    """AWD-LM on B: with more minibatches in flight its first stage bridges the bursts on the card."""
    plain = _outcome("awd-lm-v100", "B")
    plan, score, told = choose_by_simulation(plain.problem, plain.plan, plain.evaluation, [], None, Deadline())
    (own,) = [rival for rival in told.rivals if rival.plan == plain.plan]
    assert score.pace_s == pytest.approx(plain.objective_s, rel=EQUAL)
    assert [stage.workers for stage in plan.stages] == [stage.workers for stage in plain.plan.stages]
    assert plan.stages[0].depth > plain.plan.stages[0].depth
    assert plan.stages[0].versions == plan.versions(0)
    assert told.simulated_s is not None
    assert own.simulated_s is not None
    assert told.simulated_s < own.simulated_s / 1.1
    assert told.shallower_s in [one.simulated_s for one in told.rivals]
    assert told.stated_s == max(told.simulated_s, told.shallower_s or 0.0)
    assert evaluate(plan, plain.problem).fits


def test_a_slower_prediction_is_taken_where_the_simulation_is_clearly_faster() -> None:
    """GNMT-8 on A under 2BW: a grid that is predicted 2% slower is a sixth faster in the simulation."""
    plain = _outcome("gnmt8-v100", "A", schedule="2bw", accumulate=32)
    others = [Rival(one.name, one.plan) for one in plain.baselines if one.plan is not None]
    plan, score, told = choose_by_simulation(plain.problem, plain.plan, plain.evaluation, others, None, Deadline())
    assert plan.config == "4-4-4-4"
    assert plain.objective_s < score.pace_s < 1.05 * plain.objective_s
    assert told.faster == ()
    (own,) = [rival for rival in told.rivals if rival.plan == plain.plan]
    assert told.stated_s is not None
    assert told.stated_s < own.stated_s / 1.15


def test_of_plans_that_are_simulated_alike_the_one_with_fewer_workers_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The grid, with one more minibatch in flight, is 1.6% faster in the simulation."""
    monkeypatch.setattr(choose, "ALIKE", 0.03)
    plain = _outcome("gnmt8-v100", "A")
    (grid,) = [one.plan for one in plain.baselines if one.name == "best uniform grid"]
    assert grid is not None
    assert grid.busy > plain.plan.busy
    begun = choose_by_simulation(
        plain.problem, grid, evaluate(grid, plain.problem), [Rival("dp", plain.plan)], None, Deadline()
    )
    assert begun[0].config == plain.plan.config


def test_what_takes_long_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    pace._REMEMBERED.clear()
    monkeypatch.setattr(pace, "affordable", lambda scenario, plan, most: None)
    done = run("solve", "s2vt-v100", "--cluster", "B", "--solver", "dp", "--no-write", "--schedule", "1f1b-stashing")
    assert done.code == 0
    assert "Not simulated: a simulation of a plan of this size takes long." in done.out
    assert "Simulated:" not in done.out


def test_without_time_nothing_is_simulated() -> None:
    plain = _outcome("s2vt-v100", "B")
    pace._REMEMBERED.clear()
    told = choose_by_simulation(plain.problem, plain.plan, plain.evaluation, [], None, Deadline.after(0.0))[2]
    assert (told.simulated_s, told.note) == (None, "there was no time left")


def test_the_command_says_by_how_much_and_can_leave_it_out(run: Run) -> None:
    words = ("solve", "s2vt-v100", "--cluster", "B", "--solver", "dp", "--no-write", "--schedule", "1f1b-stashing")
    told = run(*words).out
    assert "samples/s), simulated." in told
    assert "By the formulas, which the verdict is about: " in told
    assert "imulat" not in run(*words, "--no-simulation").out


def test_the_answer_states_the_simulated_pace_where_it_differs() -> None:
    plain = _outcome("s2vt-v100", "A")
    told = choose_by_simulation(plain.problem, plain.plan, plain.evaluation, [], None, Deadline())[2]
    outcome = replace(plain, simulation=told)
    assert told.differs
    assert told.stated_s is not None
    assert outcome.predicted_s == told.stated_s >= (told.simulated_s or 0.0)
    assert told.stated_ratio == pytest.approx(told.stated_s / outcome.objective_s)
    assert outcome.predicted_s != outcome.objective_s
    assert outcome.throughput.samples_per_s == pytest.approx(80 / outcome.predicted_s)
    alike = replace(told, simulated_s=outcome.objective_s * 1.005, ratio=1.005, shallower_s=None)
    assert replace(outcome, simulation=alike).predicted_s == outcome.objective_s


def test_gradients_do_not_become_older_than_models_learn_from() -> None:
    """A plan within the limit is not made deeper beyond it; one that is beyond it already is."""
    plain = _outcome("s2vt-v100", "A").plan
    shallow = replace(plain, stages=(replace(plain.stages[0], depth=2, versions=3), plain.stages[1]))
    assert max(Updates.of(shallow, 1).stale_by) == MOST_STALE - 1
    own = [rival.plan.stages[0].depth for rival in choose._deeper(shallow)]
    assert own == [3]
    beyond = [rival.plan.stages[0].depth for rival in choose._deeper(plain)]
    assert beyond == [plain.stages[0].depth + more for more in choose.DEEPER]


def test_a_deeper_plan_has_a_reserve_unless_that_is_slower() -> None:
    plain = _outcome("s2vt-v100", "A")

    def made(simulated_s: float, deeper: int = 0) -> SimulatedPlan:
        return SimulatedPlan("a plan", plain.plan, plain.evaluation, simulated_s, deeper=deeper)

    own, one, two, other, slower = made(1.3), made(1.0, 1), made(1.005, 2), made(1.0), made(1.1, 2)
    for best, found, taken, before_s in (
        (one, [own, one, two, other], two, 1.0),
        (one, [own, other, one, slower], one, 1.3),
        (one, [own, one], one, 1.3),
        (own, [own, one, two], own, None),
        (other, [own, one, two, other], other, None),
    ):
        assert choose._with_reserve(best, found) is taken
        assert choose._shallower_s(taken, found) == before_s


@pytest.mark.parametrize(("options", "bounded"), [({}, True), ({"schedule": "gpipe", "accumulate": 16}, False)])
def test_one_pipeline_without_a_flush_is_not_stated_faster_than_by_the_formulas(
    options: dict[str, object], bounded: bool
) -> None:
    outcome = _outcome("alexnet-v100", "B", **options)
    plan, score = outcome.plan, outcome.evaluation
    told = PlanSimulation.of(SimulatedPlan("the plan", plan, score, score.pace_s / 2))
    assert told.least_s == (score.pace_s if bounded else 0.0)
    assert told.stated_s == score.pace_s / (1 if bounded else 2)
    assert told.differs is not bounded


@pytest.mark.parametrize("schedule", ["1f1b-flush", "gpipe", "1f1b-stashing", "2bw"])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2, 1), (3, 1, 2), (1, 3)])
def test_no_plan_is_stated_faster_than_the_pace_by_which_it_is_left_out(
    schedule: str, replicas: tuple[int, ...]
) -> None:
    """Up to rounding: links as slow as computing, and as fast as can be."""
    for bandwidth in (3e8, 1e12):
        levels = (Level("server", 2, 1e10, 1e-6), Level("cluster", 3, bandwidth, 1e-5))
        cluster = Cluster("lab", Device("chip", "cuda", 1 << 40), levels)
        accumulate = {"1f1b-stashing": None, "2bw": 12}.get(schedule, 7)
        problem = Problem(long_chain(6, seed=3), cluster, Options(schedule=schedule, accumulate=accumulate))
        ends = [6 * index // len(replicas) for index in range(len(replicas) + 1)]
        first = list(itertools.accumulate(replicas, initial=0))
        stages = [
            Stage(problem.layer_names[start:end], tuple(range(worker, worker + count)), 1, 1)
            for (start, end), worker, count in zip(itertools.pairwise(ends), first, replicas, strict=False)
        ]
        plan = depths.assign_depths(Plan(tuple(stages)), problem, problem.work_s / cluster.workers)
        score = evaluate(plan, problem)
        found = simulated("", plan, score, problem, NO_DEADLINE)
        assert found.simulated_s is not None
        least_s = least_possible_s(plan, score, problem)
        assert 0 < least_s <= found.stated_s * (1 + 1e-9)


@pytest.mark.parametrize(("gain", "expected"), [(1.0, 1), (0.95, 3)])
def test_where_one_more_minibatch_in_flight_changes_nothing_no_more_are_tried(
    gain: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, tried = _outcome("s2vt-v100", "B", schedule="1f1b-stashing"), list[str]()

    def told(name: str, plan: Plan, score: Evaluation, *_: object) -> SimulatedPlan:
        slow = 2.0 if not tried else 2.0 * gain
        tried.append(name)
        return SimulatedPlan(name, plan, score, score.pace_s * slow, minibatches=10)

    monkeypatch.setattr(choose, "simulated", told)
    monkeypatch.setattr(choose, "MOST_STALE", 1000)
    choose_by_simulation(outcome.problem, outcome.plan, outcome.evaluation, [], None, Deadline())
    assert sum(name in choose.DEEPER.values() for name in tried) == expected


def test_more_workers_are_not_used_for_what_a_simulation_hardly_tells() -> None:
    """The plan with fewer workers is taken of two with one predicted pace, unless it is simulated over 3% slower."""
    problem = _outcome("gnmt8-v100", "A").problem
    few, many = (plain_data_parallel(problem, workers) for workers in (4, 8))

    def tied(few_s: float, many_s: float) -> list[tuple[SimulatedPlan, float]]:
        plans = [("few", few, few_s), ("many", many, many_s)]
        return [(SimulatedPlan(name, plan, evaluate(plan, problem), pace), pace) for name, plan, pace in plans]

    assert choose._of_fewest_workers(tied(1.02, 1.0), 1.0).name == "few"
    assert choose._of_fewest_workers(tied(1.04, 1.0), 1.0).name == "many"
    assert choose._of_fewest_workers(tied(1.0, 1.0), 1.0).name == "few"
