"""The replay of plans: against the evaluator's step time, against figures by hand, and where a schedule cannot work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from extents import first_few
from instances import random_instance, to_problem
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate, exposed_allreduce_per_minibatch_s, idle_per_minibatch_s
from pipeplan.cost.formulas import overlapped
from pipeplan.cost.stage_times import plain_data_parallel
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.outcome import Outcome, Verdict
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.plan_json import plan_document
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.events import SimulatedEvents
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.memory import memory_over_time, peak_memory
from pipeplan.simulation.metrics import SimulationReport, enough_minibatches, summarise_simulation
from pipeplan.simulation.perfetto import trace_document
from pipeplan.simulation.scenario import Scenario, StageBoundary, StageLoad, scenario_from_document
from pipeplan.simulation.simulate import Simulated
from pipeplan.simulation.terminal import draw_timeline
from pipeplan.util.files import Node
from pipeplan_launch.plan.schedule import SCHEDULES, Action, ActionKind, Schedule, StageShape, version_fixed

TRAINING = SCHEDULES["1f1b-stashing"]


def _scenario(
    *stages: tuple[int, int, float, float], sync: float = 0.0, overlap: float = 1.0, hop: StageBoundary | None = None
) -> Scenario:
    """Stages as (replicas, depth, forward_s, backward_s); all-reduces of `sync` seconds where there are replicas."""
    loads, worker = [], 0
    for replicas, depth, forward, backward in stages:
        mine = tuple(range(worker, worker + replicas))
        loads.append(StageLoad(mine, depth, forward, backward, sync if replicas > 1 else 0.0, 8, 500, 10, depth + 1))
        worker += replicas
    hops = tuple((hop or StageBoundary(0.0, 0.0),) for _ in stages[1:])
    config = "-".join(str(stage[0]) for stage in stages)
    return Scenario(config, tuple(loads), hops, TRAINING, overlap, 1.0)


def _run(scenario: Scenario, minibatches: int | None = None) -> tuple[SimulatedEvents, SimulationReport]:
    count = minibatches or enough_minibatches(scenario)
    replayed = simulate_schedule(scenario, count)
    return replayed, summarise_simulation(scenario, replayed, count)


def _step_time(scenario: Scenario) -> float:
    steady = _run(scenario)[1].steady
    return steady.step_time_s


def _read(plan: Plan, problem: Problem) -> Scenario:
    """The scenario of a plan as its plan.json gives it, which is also that of the plan before it is written."""
    score = evaluate(plan, problem)
    document = plan_document(Outcome(problem, plan, score, (), Verdict(True, False, ""), (), {}))
    scenario = scenario_from_document(Node(document, "plan.json"))
    assert simulate_schedule(scenario, 20) == simulate_schedule(scenario_of_plan(plan, problem, score), 20)
    return scenario


def _servers(servers: int, workers: int = 1, rate: float = 100.0) -> Cluster:
    """Servers that are joined at a rate in bytes/s, with fast links inside."""
    levels = (Level("server", workers, 1e6 if workers > 1 else 0.0), Level("cluster", servers, rate))
    return Cluster("t", Device("d", "cuda", 10**12), levels)


@cache
def _solved(seed: int) -> tuple[Outcome, Scenario] | None:
    """A random problem solved by the dynamic program, or None where there is nothing to plan or no plan."""
    settings = Settings(solver="dp", certify=False, simulate=False, compare=False)
    try:
        outcome = solve(to_problem(random_instance(seed)), settings)
    except (InfeasibleError, InputError):
        return None
    return outcome, scenario_from_document(Node(plan_document(outcome), f"seed {seed}"))


@pytest.mark.slow
def test_random_plans_run_at_the_step_time_and_with_the_idle_times_that_the_evaluator_says() -> None:
    kinds, checked, replicated = set(), 0, 0
    for seed in range(110):
        if (found := _solved(seed)) is None or found[1].copies > 1:
            continue
        (outcome, scenario), (_, report) = found, _run(found[1])
        assert report.ratio == pytest.approx(1.0, rel=0.01), f"seed {seed}: {scenario.config}"
        checked += 1
        kinds.add((len(scenario.stages) > 1, scenario.schedule.trains, scenario.overlap))
        if abs(report.ratio - 1) > 1e-6 or outcome.plan.inference:
            continue  # without backward passes stages run ahead
        plan, problem, score = outcome.plan, outcome.problem, outcome.evaluation
        for index, stage in enumerate(report.stages):
            interval = plan.stages[index].replicas * score.step_time_s
            held = exposed_allreduce_per_minibatch_s(plan, problem, score, index) / interval
            idle = idle_per_minibatch_s(plan, problem, score, index) / interval
            assert held == pytest.approx(stage.synchronising, abs=1e-6)
            assert idle == pytest.approx(1 - stage.computing - stage.synchronising, abs=1e-6)
            replicated += stage.replicas > 1
    assert checked >= 60
    assert replicated >= 5
    assert len(kinds) >= 10, "not every kind of plan came up"


@pytest.mark.parametrize("seeds", first_few(range(110), 12))
def test_no_random_plan_is_faster_than_predicted_or_holds_more_than_its_depth(seeds: range) -> None:
    for seed, (_, scenario) in ((seed, found) for seed in seeds if (found := _solved(seed)) is not None):
        report = _run(scenario)[1]
        assert all(stage.peak_in_flight <= stage.depth for stage in report.stages), f"seed {seed}"
        if scenario.copies == 1:
            assert report.ratio > 0.999, f"seed {seed}: {scenario.config}"


def test_data_parallelism_needs_what_the_cost_model_says() -> None:
    for overlap, sync in itertools.product((0.0, 0.25, 0.7, 1.0), (0.0, 1.0, 3.0, 10.0)):
        scenario = _scenario((3, 1, 1.0, 2.0), sync=sync, overlap=overlap)
        assert _step_time(scenario) == pytest.approx(float(overlapped(3.0, sync, overlap)) / 3)


def test_a_straight_pipeline_by_hand() -> None:
    """Two stages of 1 + 2 s, messages of 0.5 s that arrive 0.25 s later.

    F0 of stage 1 ends at 1 and is there at 1.75. Depth 3 then keeps stage 2 busy, 3 s a minibatch. The last gradient is
    at stage 1 after 0.75, and the backward pass takes 2 s: a drain of 2.75.
    """
    scenario = _scenario((1, 3, 1.0, 2.0), (1, 1, 1.0, 2.0), hop=StageBoundary(0.5, 0.25))
    replayed, report = _run(scenario, 30)
    assert report.fill_s == pytest.approx(1.75)
    assert report.drain_s == pytest.approx(2.75)
    assert report.total_s == pytest.approx(1.75 + 30 * 3.0 + 2.75)
    assert report.steady.step_time_s == pytest.approx(3.0)
    assert [stage.peak_in_flight for stage in report.stages] == [3, 1]
    assert [stage.computing for stage in report.stages] == pytest.approx([1.0, 1.0])
    assert report.links == pytest.approx({"stage 1 → 2": 0.5 / 3, "stage 2 → 1": 0.5 / 3})
    first = [(str(done.action), done.start_s) for done in replayed.passes if done.stage == 1][:3]
    assert first == [("F0", 1.75), ("B0", 2.75), ("F1", 4.75)]


def test_depths_and_links_that_are_the_slowest_part() -> None:
    """Depth 1 leaves one minibatch under way: both stages and two transfers in turn. Gradients take 4 s back. Messages
    of 4 s over two links, between two replicas and two, take 2 s a minibatch.
    """
    for stages, hop, step_time_s, links in (
        (((1, 1, 1.0, 2.0), (1, 1, 1.0, 2.0)), StageBoundary(0.5, 0.25), 6.0 + 2 * 0.75, 2),
        (((1, 8, 1.0, 2.0), (1, 1, 1.0, 2.0)), StageBoundary(0.5, 0.0, 4.0), 4.0, 2),
        (((2, 9, 0.5, 1.0), (2, 1, 0.5, 1.0)), StageBoundary(4.0, 0.0, 4.0, 2), 2.0, 4),
    ):
        report = _run(_scenario(*stages, hop=hop))[1]
        assert report.steady.step_time_s == pytest.approx(step_time_s)
        assert len(report.links) == links
    assert list(report.links) == [f"stage {way}, link {link}" for way in ("1 → 2", "2 → 1") for link in (1, 2)]
    # A link carries one message at a time, whatever the replicas.
    scenario = _scenario((2, 20, 0.1, 0.2), (2, 1, 0.1, 0.2), hop=StageBoundary(1.0, 0.5))
    replayed, report = _run(scenario)
    assert report.steady.step_time_s == pytest.approx(1.0)
    forward = [done for done in replayed.transfers if done.row == "stage 1 → 2"]
    assert all(later.start_s >= earlier.end_s for earlier, later in pairwise(forward))


def test_copies_have_boundaries_of_their_own_and_share_the_link_between_them() -> None:
    """Two copies of 1-1: four workers, 3 s of work each a minibatch, and two all-reduces for every two minibatches."""
    loads = tuple(StageLoad(workers, depth, 1.0, 2.0, 4.0) for workers, depth in (((0, 2), 5), ((1, 3), 1)))
    hops = ((StageBoundary(0.5, 0.0), StageBoundary(0.5, 0.0)),)
    scenario = Scenario("2×(1-1)", loads, hops, TRAINING, 1.0, 4.0, copies=2)
    assert _step_time(scenario) >= 4.0, "two of 4 s on one link"
    replayed, report = _run(scenario)
    shared = [done for done in replayed.transfers if done.row == "all-reduce"]
    assert all(later.start_s >= earlier.end_s for earlier, later in pairwise(shared))
    assert {"stage 1 → 2, copy 1", "stage 1 → 2, copy 2"} <= report.links.keys()


def _accumulating(name: str, accumulate: int, *stages: tuple[int, int, float, float], sync: float = 0.0) -> Scenario:
    scenario = _scenario(*stages, sync=sync, overlap=0.0 if "2bw" not in name else 1.0)
    return replace(scenario, schedule=SCHEDULES[name], accumulate=accumulate)


def test_a_pipeline_that_drains_by_hand() -> None:
    """GPipe, two stages of 1 + 2 s, three minibatches: 1 + 3 s of forwards, then 3 · 2 s and 2 s of backwards: 12 s.

    1F1B with depths 2 and 1 needs as long: the last stage is busy for 9 s, 1 s later, and the first 2 s after it.
    """
    for name, held in (("gpipe", (3, 3)), ("1f1b-flush", (2, 1))):
        scenario = _accumulating(name, 3, *((1, depth, 1.0, 2.0) for depth in held))
        replayed, report = _run(scenario, 9)
        assert report.total_s == pytest.approx(3 * 12.0)
        assert _step_time(scenario) == pytest.approx(4.0)
        begun = [done.start_s for done in replayed.passes if str(done.action) in ("F0", "F3", "F6") and done.stage == 0]
        assert begun == pytest.approx([0.0, 12.0, 24.0])
        assert [stage.peak_in_flight for stage in report.stages] == list(held)


def test_an_all_reduce_after_a_flush_holds_its_replicas_up() -> None:
    """One stage on two replicas, 4 minibatches of 3 s, and 2.5 s that nothing hides."""
    scenario = _accumulating("gpipe", 4, (2, 2, 1.0, 2.0), sync=2.5)
    assert _step_time(scenario) == pytest.approx((2 * 3.0 + 2.5) / 4)
    # The second of two stages waits for its own while the first drains (2 s) and fills (1 s) again.
    scenario = _accumulating("1f1b-flush", 4, (1, 2, 1.0, 2.0), (2, 1, 1.0, 2.0), sync=3.0)
    assert _step_time(scenario) == pytest.approx(
        _step_time(_accumulating("1f1b-flush", 4, *([(1, 2, 1.0, 2.0), (2, 1, 1.0, 2.0)])))
    )


def test_every_replica_makes_the_whole_step_of_an_update() -> None:
    """Four minibatches of 3 s on two replicas, and a step of 1 s: 2 · 3 + 1 s, where a quarter of the step for each
    minibatch would be half a step."""
    profile = chain([Layer("a", 1.0, 2.0, 8, 1, update_s=1.0)], 0)
    for schedule in ("gpipe", "1f1b-flush", "2bw"):
        problem = Problem(profile, _servers(2, rate=1e15), Options(schedule=schedule, accumulate=4))
        scenario = _read(plain_data_parallel(problem, 2), problem)
        assert scenario.stages[0].busy_s == pytest.approx(3.0 + 1.0 / 2)
        assert 4 * _step_time(scenario) == pytest.approx(2 * 3.0 + 1.0)
        stage = _run(scenario)[1].stages[0]
        assert (stage.computing, stage.synchronising) == (pytest.approx(1.0), pytest.approx(0.0))


def _peaks(scenario: Scenario, minibatches: int) -> list[int]:
    replayed = simulate_schedule(scenario, minibatches)
    return peak_memory(scenario, memory_over_time(scenario, replayed, minibatches))


def test_memory_over_time_by_hand() -> None:
    """Two straight stages, weights of 10 bytes and 8 for each minibatch in flight; 500 are planned for each worker."""
    scenario = _scenario((1, 2, 1.0, 2.0), (1, 1, 1.0, 2.0))
    fixed = [500 - 3 * 10 - 2 * 8, 500 - 2 * 10 - 8]
    assert [load.fixed_bytes for load in scenario.stages] == fixed
    steps = memory_over_time(scenario, simulate_schedule(scenario, 3), 3)
    # F0 F1 B0 U0 F2 B1 U1 B2 U2 at the first stage: a version is kept as long as a minibatch has to use it.
    held = [(size - fixed[0]) for _, size in steps[0, 0]]
    assert held == [10 + 8, 10 + 16, 10 + 8, 20 + 8, 20 + 16, 10 + 8, 20 + 8, 10, 10]
    assert _peaks(scenario, 3) == [fixed[0] + 20 + 16, fixed[1] + 10 + 8]


def test_no_worker_holds_more_than_is_planned() -> None:
    """By schedule, the planned versions of both stages, and those that are not in use.

    One version less is in use where an update is late: that one is for the gradients on their way. A depth of 1 needs
    one version only, and has put off the update of 2bw until the other is free.
    """
    for name, versions, unused in (
        ("1f1b-stashing", (4, 2), (1, 1)),
        ("vertical-sync", (4, 8), (1, 0)),
        ("2bw", (2, 2), (0, 1)),
        ("gpipe", (1, 1), (0, 0)),
        ("1f1b-flush", (1, 1), (0, 0)),
    ):
        scenario = _scenario((2, 3, 1.0, 2.0), (1, 6 if name == "gpipe" else 1, 0.5, 1.0), sync=0.1)
        loads = tuple(replace(load, versions=count) for load, count in zip(scenario.stages, versions, strict=True))
        scenario = replace(scenario, stages=loads, schedule=SCHEDULES[name], accumulate=6)
        planned = [load.memory_bytes - 10 * spare for load, spare in zip(loads, unused, strict=True)]
        assert _peaks(scenario, 60) == planned, name


def test_inference_runs_at_the_step_time_of_its_slowest_part() -> None:
    scenario = replace(_scenario((1, 1, 1.0, 0.0), (2, 1, 3.0, 0.0)), schedule=SCHEDULES["forward-only"])
    replayed, report = _run(scenario)
    assert report.steady.step_time_s == pytest.approx(1.5)
    assert {done.action.kind for done in replayed.passes} == {ActionKind.FORWARD}
    assert [stage.peak_in_flight for stage in report.stages] == [1, 1]
    assert report.fill_s == pytest.approx(1.0)


def _of(*streams: str) -> Schedule:
    """A schedule that gives stage s the actions of the s-th text, on every replica."""

    def stream(pipeline: Sequence[StageShape], stage: int, replica: int, minibatches: int) -> Iterator[Action]:
        return (Action.parse(text) for text in streams[stage].split())

    return Schedule("made up", stream, frozenset(ActionKind), trains=True, version=version_fixed)


def test_an_impossible_schedule_is_reported() -> None:
    for streams, action in (
        (("B0 F0", "F0 B0"), "B0"),
        (("F0 B0 F1 B1", "F0 F1 B0 B1"), "B0"),
        (("F0 B0", "F1 B1"), "B0"),
        (("F0 U0 B0 R0", "F0 B0"), "U0"),
    ):
        scenario = replace(_scenario((1, 2, 1.0, 1.0), (1, 2, 1.0, 1.0)), schedule=_of(*streams))
        with pytest.raises(InputError, match=rf"deadlock after .* s: worker 0 \(stage 1\) waits forever at {action}"):
            simulate_schedule(scenario, 2)


def test_times_of_zero_do_no_harm() -> None:
    scenario = replace(_scenario((2, 2, 0.0, 0.0), (1, 1, 0.0, 0.0)), predicted_s=0.0)
    report = _run(scenario, 20)[1]
    assert (report.total_s, report.ratio) == (0, None)


def test_arrows_lead_from_each_pass_to_that_of_the_next_stage() -> None:
    """Every arrow leaves and meets an event of its own minibatch, in two stages that are neighbours."""
    scenario = _scenario((2, 3, 1.0, 2.0), (1, 1, 0.5, 1.0), (1, 1, 0.5, 1.0), hop=StageBoundary(0.25, 0.25))
    events: list[dict[str, Any]] = trace_document(scenario, simulate_schedule(scenario, 6))["traceEvents"]
    arrows: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["ph"] in "sf":
            row = [one for one in events if one["ph"] == "X" and all(one[key] == event[key] for key in ("pid", "tid"))]
            (at,) = [one for one in row if one["ts"] <= event["ts"] < one["ts"] + one["dur"]]
            arrows.setdefault(event["id"], {})[event["ph"]] = at
    assert len(arrows) == 2 * 2 * 6
    for ends in arrows.values():
        left, met = ends["s"], ends["f"]
        assert left["name"] == met["name"]
        assert met["args"]["stage"] == left["args"]["stage"] + (1 if left["cat"] == "forward" else -1)
        assert left["ts"] + left["dur"] <= met["ts"] + 1e-3


def test_the_timeline_is_a_row_a_worker_in_the_columns_given() -> None:
    scenario = _scenario((1, 2, 1.0, 2.0), (1, 1, 1.0, 2.0), hop=StageBoundary(0.0, 0.5))
    lines = [line.plain for line in draw_timeline(Simulated(scenario, *_run(scenario)), 66)]
    assert lines == [
        "w0 s1 F0----F1---..................B0=========F2----B1=========F3-",
        "w1 s2 .........F0---B0==========F1---B1==========......F2---B2====",
        "      0                                                     10.5 s",
    ]
    assert all(len(line) <= 66 for line in lines)


def test_a_plan_over_two_servers_reads_its_links_from_the_cluster() -> None:
    layers = (Layer("a", 1.0, 2.0, 0, 1), Layer("b", 1.0, 2.0, 0, 1))
    levels = (Level("server", 1, 0.0), Level("cluster", 2, 100.0, 0.25, sendrecv_efficiency=0.5))
    cluster = Cluster("t", Device("d", "cpu", 10_000, speed=2.0), levels)
    problem = Problem(chain(layers, 40), cluster, Options(stages=2))
    scenario = _read(solve(problem, Settings(solver="dp", simulate=False)).plan, problem)
    assert scenario.hops == ((StageBoundary(0.8, 0.25, 0.8, 1, 50.0),),)
    assert [stage.forward_s for stage in scenario.stages] == [0.5, 0.5]
    assert math.isclose(_step_time(scenario), 1.5)


def test_what_shares_a_network_card_shares_its_time() -> None:
    """a on server 0, b on server 1, c on server 0 again: what a sends and what c returns leave by the same card.

    100 bytes/s between servers: 1 s for either, so that the card is busy for 2 s a minibatch, each stage for 1.5 s.
    """
    layers = tuple(Layer(name, 0.5, 1.0, 0, 1) for name in "abc")
    tensors = (Tensor("x", "a", ("b",), 100, 1), Tensor("y", "b", ("c",), 1, 100))
    stages = tuple(Stage((name,), (worker,), 1, 1) for name, worker in zip("abc", (0, 2, 1), strict=True))
    for contention, step_time_s in ((True, 2.0), (False, 1.5)):
        problem = Problem(Profile(layers, tensors, 1), _servers(2, 2), Options(contention=contention))
        plan = depths.assign_depths(Plan(stages), problem, 1.5)
        score = evaluate(plan, problem)
        assert score.step_time_s == pytest.approx(step_time_s)
        assert (score.bound == "network card of server 0, outgoing") == contention
        assert _step_time(_read(plan, problem)) == pytest.approx(step_time_s, rel=1e-3)


def test_what_a_flush_waits_for_is_in_sync_also_where_it_is_a_flow() -> None:
    """Two replicas on two servers, two minibatches of 1.5 s, and 100 bytes reduced at 100 bytes/s: 1 s of 2.5 s."""
    options = Options(schedule="gpipe", accumulate=2)
    problem = Problem(chain([Layer("a", 0.5, 1.0, 100, 1)], 0), _servers(2), options)
    scenario = _read(plain_data_parallel(problem, 2), problem)
    assert scenario.cards is not None
    report = _run(scenario)[1]
    # The formulas hide the all-reduce behind the whole backward pass, in which its only bucket is filled.
    assert report.ratio == pytest.approx(2.5 / 1.5)
    assert (report.stages[0].computing, report.stages[0].synchronising) == (pytest.approx(0.6), pytest.approx(0.4))


def test_activations_wait_for_their_receive() -> None:
    """A fast stage sends to two slow replicas, whose cards are free: each has two receives posted ahead."""
    layers = (Layer("a", 1.0, 1.0, 0, 1), Layer("b", 50.0, 1.0, 0, 1))
    problem = Problem(chain(layers, 100), _servers(3), Options())
    plan = Plan((Stage(("a",), (0,), 20, 20), Stage(("b",), (1, 2), 1, 1)))
    replayed = simulate_schedule(scenario_of_plan(plan, problem, evaluate(plan, problem)), 8)
    sent = [done for done in replayed.transfers if done.row == "stage 1 → 2"]
    starts = {done.action.index: done.start_s for done in replayed.actions if done.stage and str(done.action)[0] == "F"}
    assert [done.number for done in sent] == list(range(8))
    # Each replica takes one at once, and two more leave for it; minibatch 6 leaves when minibatch 2 is taken.
    assert all(done.start_s < 10 for done in sent[:6])
    assert [done.start_s for done in sent[6:]] == [starts[2], starts[3]]
    assert starts[2] > 50


def test_buckets_leave_during_the_last_backward_pass_before_a_flush() -> None:
    """Layers a and b of 1 s backward and 30 MiB each, at 30 MiB/s for a ring of two: b's bucket leaves 1 s before the
    end of the pass and a's at the end, so that 1 s of the 2 s is left."""
    size = 30 * 2**20
    layers = (Layer("a", 0.5, 1.0, size, 1), Layer("b", 0.5, 1.0, size, 1))
    profile = chain(layers, 0)
    for overlap, left_s in ((1.0, 1.0), (0.5, 1.5), (0.0, 2.0)):
        options = Options(schedule="gpipe", accumulate=2, overlap=overlap)
        problem = Problem(profile, _servers(2, rate=float(size)), options)
        plan = plain_data_parallel(problem, 2)
        # The formulas take no less than what both seconds of the pass can hide.
        assert 2 * evaluate(plan, problem).step_time_s == pytest.approx(3.0 + 2.0 - 2.0 * overlap)
        assert 2 * _step_time(_read(plan, problem)) == pytest.approx(3.0 + left_s)
