"""Explanations: shares that add up, alternatives that are real, answers that hold when they are tried."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run
from extents import slow_but_for
from long_chains import calls_of, chain, long_chain

import pipeplan
from pipeplan.cluster_data import variants
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE, evaluate
from pipeplan.cost.stage_times import plain_data_parallel
from pipeplan.errors import InputError
from pipeplan.explanation import sensitivity
from pipeplan.explanation.explain import RobustnessSettings, explain_plan, explanation_json
from pipeplan.explanation.second_best import find_alternatives
from pipeplan.explanation.sensitivity import change_effects
from pipeplan.explanation.terminal import baseline_reasons, merged_parts
from pipeplan.explanation.time_breakdown import break_down_time, resource_loads
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.fast import ScoredPlan, best_plan
from pipeplan.planning.settings import Settings
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile

DP = Settings(solver="dp", simulate=False)
CUTS = 2000


def _profile(seed: int = 0, layers: int = 4, spread: float = 0.0, saved: int = 0) -> Profile:
    """Random layers; the last one may save more."""
    rng, spreads = random.Random(seed), {"forward_spread_s": spread, "backward_spread_s": spread}
    made = [
        Layer(
            f"l{i}", rng.uniform(1, 5), rng.uniform(2, 10), rng.choice([10, 100, 1000]), rng.randint(1, 50), **spreads
        )
        for i in range(layers)
    ]
    sizes = [rng.randint(1, 60) for _ in range(layers - 1)]
    made[-1] = replace(made[-1], saved_bytes=saved or made[-1].saved_bytes)
    return chain(made, sizes, 8, model_name="small")


def _cluster(workers: int, servers: int = 1) -> Cluster:
    levels = (Level("server", workers, 50.0), Level("cluster", servers, 20.0))
    return Cluster("c", Device("chip", "cuda", 10**9), levels)


def _problem(seed: int = 0, workers: int = 3, servers: int = 1, options: Options | None = None) -> Problem:
    return Problem(_profile(seed), _cluster(workers, servers), options or Options())


def _equal(names: str, sent: int, workers: int, parameters: int = 0) -> Problem:
    """Equal layers on a flat cluster."""
    layers = [Layer(name, 1.0, 2.0, parameters, 0) for name in names]
    return Problem(chain(layers, sent), _cluster(workers), Options(memory=False))


def _solved(problem: Problem) -> tuple[Cuts, ScoredPlan]:
    """The cuts of a problem, and its best plan by the formulas."""
    cuts = enumerate_cuts(problem, CUTS)
    best = best_plan(problem, cuts)
    assert best is not None
    return cuts, best


# Where the time goes.


def test_the_shares_of_time_add_up_and_the_first_load_is_the_bound() -> None:
    for seed, overlap in itertools.product(range(6), (0.0, 0.5, 1.0)):
        problem = _problem(seed, 2, 2, Options(overlap=overlap))
        for plan in (_solved(problem)[1].plan, plain_data_parallel(problem, 4)):
            anatomy, score = break_down_time("it", plan, problem), evaluate(plan, problem)
            assert anatomy.computing + anatomy.communication + anatomy.idle == pytest.approx(1.0)
            assert min(anatomy.computing, anatomy.communication, anatomy.idle) >= 0
            assert anatomy.computing == pytest.approx(problem.work_s / problem.cluster.total_speed / score.step_time_s)
            found = resource_loads(plan, problem, score)
            assert found[0].name == score.bound
            assert found[0].seconds == max(load.seconds for load in found)
            if plan.copies == 1:
                assert found[0].seconds == pytest.approx(score.step_time_s)
    for schedule in ("gpipe", "1f1b-flush"):
        problem = _problem(3, 3, options=Options(schedule=schedule, accumulate=6, contention=False))
        _, best = _solved(problem)
        found = resource_loads(best.plan, problem, evaluate(best.plan, problem))
        assert sum(load.seconds for load in found) == pytest.approx(best.step_time_s), "the parts of a batch add up"
    # Two stages on two servers of two, each replicated across both: everything crosses the cards.
    problem = _problem(3, 2, 2)
    names = problem.layer_names
    plan = Plan((Stage(names[:2], (0, 2), 99, 99), Stage(names[2:], (1, 3), 9, 9)))
    score = evaluate(plan, problem)
    found = resource_loads(plan, problem, score)
    assert score.step_time_s > score.alone_s
    assert (found[0].name, found[0].seconds) == (score.bound, pytest.approx(score.step_time_s))


def test_data_parallelism_that_waits_for_its_update_lists_its_all_reduce_once() -> None:
    problem = _problem(1, 4, options=Options(stages=1, overlap=1.0))
    plan = plain_data_parallel(problem, 4)
    named = [load.name for load in resource_loads(plan, problem, evaluate(plan, problem))]
    assert [name for name in named if name.startswith("gradient synchronisation of stage 1")] == [WAITS_FOR_UPDATE]


def test_what_plans_send() -> None:
    problem = _problem(1, 4)
    anatomy = break_down_time("it", plain_data_parallel(problem, 4), problem)
    parameters = sum(layer.parameter_bytes for layer in problem.profile.layers)
    # Each of 4 members sends 2 · 3/4 of the gradient, once for 4 minibatches of 8 samples.
    assert anatomy.allreduce_bytes == pytest.approx(4 * 2 * 3 / 4 * parameters / 4 / 8)
    assert anatomy.boundary_bytes == 0
    problem = _problem(1, 4, options=Options(stages=4, max_replicas=1))
    anatomy = break_down_time("it", _solved(problem)[1].plan, problem)
    assert anatomy.allreduce_bytes == 0
    assert anatomy.sent_bytes == pytest.approx(2 * sum(tensor.bytes for tensor in problem.profile.tensors) / 8)


# The second choice.


def _all_plans(problem: Problem) -> Iterator[Plan]:
    """Every pipeline of a chain on the first workers of a flat cluster, with depths that never limit."""
    names, workers = problem.layer_names, problem.cluster.workers
    for count in range(1, len(names) + 1):
        depths = [10 ** (4 * (count - 1 - stage)) for stage in range(count)]
        for cuts in itertools.combinations(range(1, len(names)), count - 1):
            parts = [names[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(names)])]
            for replicas in itertools.product(range(1, workers + 1), repeat=count):
                if sum(replicas) <= workers:
                    runs = itertools.pairwise([0, *itertools.accumulate(replicas)])
                    stages = zip(parts, runs, depths, strict=True)
                    yield Plan(tuple(Stage(part, tuple(range(*run)), depth, depth) for part, run, depth in stages))


def _fastest_other(problem: Problem, config: str) -> float:
    """The step time of the fastest plan of another configuration, by trying all."""
    return min(evaluate(plan, problem).step_time_s for plan in _all_plans(problem) if plan.config != config)


def test_no_other_configuration_is_better_than_an_exact_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Options(memory=False, contention=False)
    # A chain without weights is best with data parallelism, whose second choice is exact.
    weightless = replace(_equal("abc", 5, 4), options=free)
    problems = [*(_problem(seed, 3, options=free) for seed in range(12)), weightless]
    exact = []
    for problem in problems:
        cuts, best = _solved(problem)
        by_trying = _fastest_other(problem, best.plan.config)
        found = find_alternatives(problem, cuts, best.plan, best.step_time_s)
        assert found.second.plan.config != best.plan.config
        assert found.second.step_time_s == pytest.approx(evaluate(found.second.plan, problem).step_time_s)
        assert found.second.behind == pytest.approx(found.second.step_time_s / best.step_time_s - 1)
        assert found.second.step_time_s >= by_trying * (1 - 1e-9)
        assert not found.exact or found.second.step_time_s == pytest.approx(by_trying)
        exact.append(found.exact)
    assert exact[-1]
    monkeypatch.setattr("pipeplan.explanation.second_best.SMALL", 1)
    for problem in problems[:4]:  # as large problems, which are searched in fewer parts
        cuts, best = _solved(problem)
        found = find_alternatives(problem, cuts, best.plan, best.step_time_s)
        assert found.second.step_time_s >= _fastest_other(problem, best.plan.config) * (1 - 1e-9)
        assert not found.exact or found.second.step_time_s == pytest.approx(best.step_time_s)
    for parts, said in (
        (("1 stage", "3 stages", "4 stages", "2 stages of at most 14 replicas"), "1,3,4 stages"),
        (("1 stage",), "1 stage"),
        (("at most 3 stages", "5 stages"), "5 stages"),
    ):
        assert merged_parts(parts) == [said, *(part for part in parts if "at most" in part)]


# What would help.


def test_changes_of_a_cluster_are_those_that_are_named() -> None:
    levels = (Level("server", 2, 50.0, 0.0, 0.5, 0.8), Level("cluster", 2, 20.0, 0.0, 0.5, 0.8))
    cluster = replace(_cluster(2, 2), levels=levels)
    for level, (operation, reduce, send) in itertools.product(
        (0, 1), ((None, 2, 2), ("all-reduce", 2, 1), ("send/recv", 1, 2))
    ):
        changed = variants.with_faster_links(cluster, level, 2.0, operation)
        rates, was = changed.levels[level], levels[level]
        reduced = rates.bandwidth * rates.allreduce_efficiency
        sent = rates.bandwidth * rates.sendrecv_efficiency
        assert reduced == pytest.approx(reduce * was.bandwidth * was.allreduce_efficiency)
        assert sent == pytest.approx(send * was.bandwidth * was.sendrecv_efficiency)
        assert changed.levels[1 - level] == cluster.levels[1 - level]
    inside = Level("server", 2, 50.0)
    machines = [Server(Device("a", "cuda", 100), inside, card=10.0), Server(Device("b", "cuda", 200, 2.0), inside)]
    mixed = Cluster.of_servers("mixed", machines, (Level("cluster", 2, 20.0),))
    assert [device.memory_bytes for device in variants.with_more_memory(mixed, 2.0).devices] == [200, 200, 400, 400]
    assert [device.speed for device in variants.with_faster_devices(mixed, 2.0).devices] == [2.0, 2.0, 4.0, 4.0]
    assert variants.with_faster_links(mixed, 1, 2.0).machines[0].card == 20.0
    assert variants.with_faster_links(mixed, 0, 2.0).machines[1].inside.bandwidth == 100.0
    more = variants.grown_cluster(mixed, 3)
    assert (more.workers, more.servers, more.machines[2]) == (6, 3, machines[1])
    flat = Cluster("flat", Device("chip", "cpu", 10**9), (Level("server", 2, 50.0),))
    assert (variants.unit_of_growth(flat), variants.grown_cluster(flat, 3).workers) == ("worker", 3)


def test_faster_devices_help_and_memory_that_is_not_short_does_not() -> None:
    problem = _problem(2, 2, 2)
    cuts, best = _solved(problem)
    found = {effect.name.strip(): effect for effect in change_effects(problem, cuts, best.step_time_s)}
    assert found["devices with twice the memory"].gain == pytest.approx(1.0)
    assert (found["devices twice as fast"].gain or 0) >= 1.0
    assert (found["one more server"].gain or 0) >= 1.0
    both, parts = found["links of level cluster twice as fast"].gain, ("for all-reduce alone", "for send/recv alone")
    assert all(both >= (found[name].gain or 0) * (1 - 1e-9) for name in parts)
    # Where communication is free, devices are all that matters.
    free = _equal("ab", 0, 2)
    gains = {effect.name: effect.gain for effect in change_effects(free, enumerate_cuts(free, CUTS), 3.0)}
    assert gains.pop("devices twice as fast") == pytest.approx(2.0)
    assert gains.pop("one more server") == pytest.approx(2.0)
    assert list(gains.values()) == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("seed", slow_but_for([0, 1], range(6)))
def test_no_change_for_the_better_does_harm(seed: int) -> None:
    """Also under contention, where no solver promises it."""
    problem = _problem(seed, 2, 3)
    cuts, best = _solved(problem)
    for effect in change_effects(problem, cuts, best.step_time_s):
        if effect.name != "devices twice as fast":  # Its depths are those of the slower step time.
            assert (effect.gain or 0) >= 1 - 1e-9, effect


# How firmly.


def test_times_are_drawn_again_with_the_quartiles_that_were_measured() -> None:
    profile = _profile(3, spread=4.0)
    once, again = (sensitivity.resample_times(profile, random.Random(5)) for _ in range(2))
    assert once == again
    assert once != sensitivity.resample_times(profile, random.Random(6))
    for drawn, layer in zip(once.layers, profile.layers, strict=True):
        assert 0.1 * layer.forward_s <= drawn.forward_s <= 10 * layer.forward_s
    assert sensitivity.resample_times(_profile(3), random.Random(5)) == _profile(3)
    profile, rng = chain([Layer("a", 100.0, 100.0, 0, 0, forward_spread_s=8.0)], 0), random.Random(0)
    times = sorted(sensitivity.resample_times(profile, rng).layers[0].forward_s for _ in range(4000))
    assert times[3000] - times[1000] == pytest.approx(8.0, rel=0.08)
    assert times[2000] == pytest.approx(100.0, rel=0.01)
    with pytest.raises(InputError, match="between 0 and 1"):
        sensitivity.with_spread(profile, 1.5)


def test_a_plan_without_rivals_stays_best_and_one_with_twins_does_not() -> None:
    alone = Problem(_profile(1, layers=1), _cluster(2), Options(memory=False))
    robust = explain_plan(alone, DP, RobustnessSettings(samples=6, spread=0.2)).robustness
    assert (robust.stays_best, robust.worst) == (6, 0.0)
    # Two equal layers on two workers, gradients too costly to replicate: which is slower is a matter of chance,
    # and so with three layers is the side on which the middle one belongs.
    twins = _equal("abc", 1, 2, 10**6)
    found = explain_plan(twins, DP, RobustnessSettings(samples=12, spread=0.2)).robustness
    assert 0 < found.stays_best < 12
    assert found.same_config == 12
    assert found.worst > found.median >= 0


def test_a_given_plan_is_compared_with_the_best_and_with_baselines() -> None:
    problem = _problem(4, 4)
    poor = Plan((Stage(problem.layer_names, (0,), 1, 1),))
    found = explain_plan(problem, DP, RobustnessSettings(), poor)
    assert found.behind_best > 0
    assert found.robustness is None, "without a spread nothing is said"
    assert found.alternatives.second.behind < 0
    document = explanation_json(found)
    assert (document["plan"]["config"], document["behind_best"]) == ("1", found.behind_best)
    problem = _equal("ab", 1, 2, 10**6)
    found = explain_plan(problem, DP, RobustnessSettings())
    lines = baseline_reasons(found.anatomies, problem.capacity)
    assert found.plan.config == "1-1"
    assert lines[0].startswith("Data parallelism is ")
    assert "is lost to communication, it sends " in lines[0]
    assert lines[1] == "This plan is the best uniform grid."


# The command.


def test_json_says_the_same(run: Run) -> None:
    _profile(1, saved=6).save(Path("profile.json"))
    cluster = ("--cluster", "A", "--servers", "2", "--schedule", "1f1b-stashing")
    document = json.loads(run("explain", *cluster, "--samples", "4", "--spread", "10%", "--json").out)
    assert (document["format"], document["version"], document["feasible"]) == ("pipeplan-explanation", 1, True)
    assert document["robustness"]["samples"] == 4
    assert document["robustness"]["assumed_spread"] == pytest.approx(0.1)
    assert document["second_choice"]["config"] != document["plan"]["config"]
    assert document["resources"][0]["name"] == document["bound_by"]
    assert [one["name"] for one in document["comparison"]][:2] == ["this plan", "data parallelism"]


@pytest.mark.slow
def test_a_written_plan_is_explained_with_its_profile(run: Run) -> None:
    _profile(1, saved=6).save(Path("profile.json"))
    assert run("solve", "--cluster", "A", "--overlap", "0.5", "--minibatch", "16", "--solver", "dp").code == 0
    written = json.loads(Path("plan/plan.json").read_text())
    for arguments in (["plan"], ["plan/plan.json", "--profile", "profile.json"]):
        done = run("explain", *arguments, "--json")
        assert done.code == 0, done.err
        document = json.loads(done.out)
        assert document["plan"]["config"] == written["plan"]["config"]
        assert document["minibatch_s"] == pytest.approx(written["prediction"]["minibatch_s"])
        assert document["behind_best"] == 0
    Path("other.json").write_text(Path("profile.json").read_text().replace('"l0"', '"first"'))
    for arguments, complaint in (
        (["plan", "--profile", "other.json"], "other.json is not the profile that plan/plan.json was made from"),
        (["plan", "--profile", "profile.json", "--cluster", "A"], "--cluster is part of plan already"),
        (["profile.json", "--profile", "profile.json"], "leave out --profile"),
    ):
        done = run("explain", *arguments)
        assert (done.code, done.out) == (2, "")
        assert complaint in done.err.splitlines()[-1]


def test_without_a_schedule_it_explains_the_plan_of_a_solve(run: Run) -> None:
    ways = ("mnist-v100", "--cluster", "C")
    explained = json.loads(run("explain", *ways, "--samples", "0", "--json").out)
    solved = json.loads(run("solve", *ways, "--no-write", "--solver", "dp", "--json").out)
    assert explained["plan"]["config"] == solved["plan"]["config"]
    assert explained["minibatch_s"] == solved["prediction"]["minibatch_s"]
    assert explained["step_s"] == solved["stated"]["minibatch_s"]


def test_where_nothing_fits_it_says_what_would(run: Run) -> None:
    _profile(1, saved=30 << 30).save(Path("profile.json"))
    arguments = ("explain", "--cluster", "A", "--schedule", "1f1b-stashing")
    done = run(*arguments)
    assert done.code == 2
    assert "too large for any device" in done.out
    assert "Least device memory that suffices: 31.6 GiB" in done.out
    assert "error: nothing fits in memory: layer 'l3' alone needs 30 GiB" in done.err
    assert max(map(len, done.out.splitlines())) <= 80
    document = json.loads(run(*arguments, "--json").out)
    assert document["feasible"] is False
    assert document["oversized"][0]["layers"] == ["l3"]
    assert document["enough_memory"]["bytes"] >= 30 << 30
    for words, complaint in (
        ("--spread much", "--spread: expected a share such as '5%'"),
        ("--spread 500%", "between 0 and 1"),
        ("--samples -1", "'--samples'"),
    ):
        done = run("explain", *words.split())
        assert (done.code, done.out) == (2, "")
        assert complaint in done.err.splitlines()[-1]


@pytest.mark.slow
def test_explaining_a_long_chain_takes_seconds() -> None:
    """Every what-if is a search of its own: what they share is derived once. Counted in calls, not on a clock.

    These are 9 million calls in some four seconds; where each what-if derives everything, 59 million.
    """
    problem = Problem(long_chain(1000), pipeplan.cluster("A"), Options(overlap=1.0))
    assert calls_of(lambda: explain_plan(problem, DP, RobustnessSettings())) < 15e6
