"""The pace that an answer states decides, is the same wherever the plan is named, and proves nothing.

The small model is worked out by hand. Two equal workers; its layer `first` takes 6.2 ms (5 of them backward) and has no
weights, `heavy` takes 5.8 ms and has all of them, whose all-reduce takes 8 ms. Updates are after 8 minibatches, with a
flush.

- Data parallelism: four minibatches on each worker take 48 ms. The all-reduce begins when the last backward pass leaves
  `heavy`, 5 ms before its end, so 3 ms remain: 51 / 8 = 6.375 ms. By the formulas all of it remains: 56 / 8 = 7 ms.
- A pipeline of two stages, by the formulas: 12 ms for the first minibatch, 6.2 ms for each other: 55.4 / 8 = 6.925 ms.
  As it runs, with three in flight, the second and the third forward pass of 1.2 ms each end before the first gradient
  comes: 53 / 8 = 6.625 ms.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipeplan
from pipeplan.checker.verify import check_plan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.explanation.explain import RobustnessSettings, explain_plan
from pipeplan.from_options.build_problem import build_problem
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.choose_synchrony import SynchronyChoice
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.planning.stated import choose, pace
from pipeplan.planning.stated.choose import choose_by_simulation
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.questions import SEARCH
from pipeplan.rendering.plan_folder import write_plan
from pipeplan.rendering.plan_json import plan_document
from pipeplan.replay.run import prepare_replay
from pipeplan.report.build import predicted_pace
from pipeplan.report.comparisons import comparison_rows
from pipeplan.report.source import read_report_source
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.metrics import enough_minibatches
from pipeplan.simulation.scenario import Scenario, StageBoundary, StageLoad
from pipeplan.simulation.simulate import simulate
from pipeplan.sweeps.points import SweepPoint
from pipeplan.sweeps.sweep import solve_point
from pipeplan.util.deadline import Deadline
from pipeplan.util.files import Node
from pipeplan_launch.plan.schedule import SCHEDULES

PARALLEL_S, PARALLEL_FORMULAS_S = 6.375e-3, 7e-3
PIPELINE_S, PIPELINE_FORMULAS_S = 6.625e-3, 6.925e-3
PLAIN = Settings(solver="dp", certify=False)


def _problem(**options: Any) -> Problem:
    layers = (Layer("first", 1.2e-3, 5e-3, 0, 0), Layer("heavy", 2e-3, 3.8e-3, 80_000_000, 0))
    profile = Profile(layers, (Tensor("t", "first", ("heavy",), 1000, 1000),), 4)
    cluster = Cluster("two", Device("d", "cuda", 1 << 34), (Level("server", 2, 1e10),))
    return Problem(profile, cluster, Options(schedule="1f1b-flush", accumulate=8, **options))


def _document(outcome: Outcome) -> Any:
    return json.loads(json.dumps(plan_document(outcome)))


def test_a_flush_is_stated_without_what_its_last_backward_pass_hides() -> None:
    outcome = solve(_problem(stages=1, allow_copies=False), PLAIN)
    assert outcome.objective_s == pytest.approx(PARALLEL_FORMULAS_S)
    assert outcome.predicted_s == pytest.approx(PARALLEL_S, rel=1e-3)
    assert [one.gain(outcome.predicted_s) for one in outcome.baselines if one.name == "data parallelism"] == [1.0]


def test_what_is_fastest_as_stated_is_taken_and_the_proof_stays_with_the_formulas() -> None:
    problem = _problem(allow_copies=False)
    by_formulas = solve(problem, replace(PLAIN, simulate=False))
    assert (by_formulas.plan.config, by_formulas.predicted_s) == ("1-1", pytest.approx(PIPELINE_FORMULAS_S, rel=1e-5))
    outcome = solve(problem, replace(PLAIN, certify=True))
    assert (outcome.plan.config, outcome.predicted_s) == ("2", pytest.approx(PARALLEL_S, rel=1e-3))
    assert not outcome.verdict.proven
    assert outcome.verdict.text.startswith(
        "by the formulas 1.08% slower than the fastest plan, and taken as it is faster"
    )
    fastest = outcome.baselines[-1]
    assert (fastest.name, fastest.config, fastest.pace_s) == (
        "fastest plan",
        "1-1",
        pytest.approx(PIPELINE_FORMULAS_S, rel=1e-5),
    )
    assert fastest.gain(outcome.predicted_s) == pytest.approx(PIPELINE_S / PARALLEL_S, rel=1e-3)
    checked = check_plan(Node(_document(outcome), "plan.json"), problem.profile)
    assert checked.wrong is None
    assert checked.holds("stated pace")


@pytest.mark.parametrize(
    ("path", "what"),
    [
        (("stated", "minibatch_s"), "stated pace"),
        (("stated", "minibatches_per_s"), "stated pace"),
        (("simulation", "minibatch_s"), "stated pace"),
        (("baselines", 0, "stated_s"), "baselines"),
        (("baselines", -1, "stated_s"), "baselines"),
        (("baselines", -1, "gain"), "baselines"),
    ],
)
def test_a_wrong_stated_pace_is_found(path: tuple[Any, ...], what: str) -> None:
    problem = _problem(allow_copies=False)
    document = _document(solve(problem, PLAIN))
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] *= 0.9
    wrong = check_plan(Node(document, "plan.json"), problem.profile).wrong
    assert wrong is not None
    assert wrong.what == what


def test_older_plans_state_the_pace_of_the_formulas() -> None:
    problem = _problem(allow_copies=False)
    document = _document(solve(problem, replace(PLAIN, simulate=False)))
    del document["stated"]
    for entry in document["baselines"]:
        del entry["stated_s"], entry["simulated_s"]
    assert check_plan(Node(document, "plan.json"), problem.profile).wrong is None


def test_the_same_number_everywhere(tmp_path: Path) -> None:
    problem = _problem(allow_copies=False)
    outcome = solve(problem, PLAIN)
    write_plan(outcome, tmp_path / "plan")
    document = json.loads((tmp_path / "plan" / "plan.json").read_text())
    stage = json.loads((tmp_path / "plan" / "stages" / "stage-0.json").read_text())
    source = read_report_source(Node(document, "plan.json"), problem.profile)
    point = SweepPoint(problem.profile, problem.cluster, problem.options)
    explained = explain_plan(problem, replace(SEARCH, simplest=0.0), RobustnessSettings(0))
    stated = {
        "answer": outcome.predicted_s,
        "plan.json": document["stated"]["minibatch_s"],
        "throughput": problem.profile.minibatch / document["throughput"]["samples_per_s"],
        "stage file": stage["prediction"]["minibatch_s"],
        "report": predicted_pace(source)["minibatch_s"],
        "comparison": comparison_rows(source, None)[0].minibatch_s,
        "replay": prepare_replay(tmp_path / "plan", problem.profile, 1.0).plan.predicted_s,
        "explain": explained.stated_s,
    }
    assert stated == {name: pytest.approx(PARALLEL_S, rel=1e-3) for name in stated}
    assert len({f"{one:.9g}" for one in stated.values()}) == 1
    # A sweep searches for no baselines but data parallelism, which is what is taken here.
    answer = solve_point(point, replace(SEARCH, simplest=0.0))
    assert (answer.pace_s, answer.config) == (pytest.approx(outcome.predicted_s), "2")
    assert answer.over_parallelism == pytest.approx(1.0)


def test_a_simulation_is_as_long_whoever_asks_and_exact_with_a_flush() -> None:
    plain = pipeplan.solve(
        pipeplan.read_profile("gnmt8-v100"),
        pipeplan.cluster("B"),
        schedule="1f1b-flush",
        accumulate=32,
        settings=replace(PLAIN, simulate=False, compare=False),
        simplest=0,
    )
    problem, plan, score = plain.problem, plain.plan, plain.evaluation
    scenario = scenario_of_plan(plan, problem, score)
    count = pace.affordable(scenario, plan, pace.MOST_PASSES)
    assert count is not None
    assert count < enough_minibatches(scenario)
    whole, short = simulate(scenario).report.ratio, simulate(scenario, count).report.ratio
    assert short == pytest.approx(whole, rel=1e-6)
    pace._REMEMBERED.clear()
    first = pace.simulated("first", plan, score, problem, Deadline())
    again = pace.simulated("again", plan, score, problem, Deadline.after(0.0), passes=1)
    assert (first.simulated_s, first.minibatches) == (again.simulated_s, again.minibatches)
    assert first.minibatches == count


def _choice(name: str, cluster: str, **options: Any) -> SynchronyChoice:
    built = build_problem(pipeplan.read_profile(name), pipeplan.cluster(cluster), schedule="best", **options)
    assert built.synchrony is not None
    return built.synchrony


def test_copies_that_are_data_parallelism_gain_nothing_over_it() -> None:
    """S2VT on B: with one minibatch on each worker, two copies of one stage of eight are one ring of sixteen.

    The formulas charge two all-reduces that are shorter together, and so find a gain of 7%.
    """
    stated, formulas = _choice("s2vt-v100", "B"), _choice("s2vt-v100", "B", simulate=False)
    assert formulas.synchronous is not None
    assert formulas.synchronous.plan.config == "2×(8)"
    assert formulas.synchronous.pace_s == formulas.synchronous.formulas_s
    assert stated.synchronous is not None
    assert stated.synchronous.plan.config == "16"


def test_the_choice_states_the_pace_that_the_answer_states() -> None:
    """AWD-LM on B: bursts on a card make the pipeline slower than data parallelism, not a fifth faster."""
    choice = _choice("awd-lm-v100", "B")
    stale, parallel = choice.asynchronous, choice.parallel
    assert stale is not None
    assert parallel is not None
    assert stale.formulas_s * 1.15 < parallel.pace_s < stale.pace_s
    assert "fewer samples/s than the fastest synchronous one" in choice.reason
    assert choice.to_json()["asynchronous"]["minibatch_s"] == stale.pace_s
    taken = _choice("awd-lm-v100", "B", staleness="any", asynchronous_gain=0).asynchronous
    assert taken is not None
    own = solve(taken.problem, replace(PLAIN, simulate=False, compare=False))
    plan, score, told = choose_by_simulation(taken.problem, own.plan, own.evaluation, [], None, Deadline())
    assert plan == taken.plan
    assert told.pace_s(score.pace_s) == pytest.approx(taken.pace_s)


def test_a_plan_with_older_gradients_is_not_taken_for_its_stated_pace() -> None:
    problem = _problem(stages=2)
    problem = replace(problem, options=replace(problem.options, schedule="1f1b-stashing", accumulate=None))
    answer = solve(problem, replace(PLAIN, simulate=False))
    first, last = answer.plan.stages
    slower = replace(answer.evaluation, pace_s=answer.objective_s * 1.01)
    own = pace.SimulatedPlan("own", answer.plan, answer.evaluation, 2e-2)
    young = pace.SimulatedPlan("young", replace(answer.plan, stages=(replace(first, depth=4), last)), slower, 1e-2)
    old = pace.SimulatedPlan("old", replace(answer.plan, stages=(replace(first, depth=5), last)), slower, 1e-2)
    assert choose._or_faster_as_stated(own, [own, young]) is young
    assert choose._or_faster_as_stated(own, [own, old]) is own
    almost = replace(young, simulated_s=2e-2 / 1.02)
    assert choose._or_faster_as_stated(own, [own, almost]) is own, "which is within what simulations tell"


@pytest.mark.parametrize("replicas", [(1, 1), (4, 4), (1, 3, 4), (2, 3, 5), (1, 3, 4, 4, 4), (7, 1)])
@pytest.mark.parametrize("group", [1, 2, 8, 16, 60])
def test_the_shortest_simulation_of_a_flush_has_a_steady_part(replicas: tuple[int, ...], group: int) -> None:
    loads, worker = [], 0
    for count in replicas:
        depth = -(-group // count)
        loads.append(StageLoad(tuple(range(worker, worker + count)), depth, 1.0, 2.0, 0.0))
        worker += count
    boundaries = tuple((StageBoundary(0.1, 0.0),) for _ in replicas[1:])
    flushing = Scenario("", tuple(loads), boundaries, SCHEDULES["1f1b-flush"], 1.0, 1.0, accumulate=group)
    layers = iter("abcdefgh")
    plan = Plan(tuple(Stage((next(layers),), load.workers, load.depth, 1) for load in loads))
    count = pace.affordable(flushing, plan, 10**6)
    assert count is not None
    assert simulate(flushing, count).report.steady is not None
