"""DP, ILP and evaluator against brute force, which shares no code with them, and against each other's proofs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import brute_force
import pytest
from instances import random_instance, to_problem

from pipeplan.cluster import Cluster
from pipeplan.cuts import enumerate_cuts
from pipeplan.errors import InputError
from pipeplan.evaluate import evaluate
from pipeplan.problem import Problem
from pipeplan.profile import Profile
from pipeplan.solve import Settings, solve
from pipeplan.solvers import dp, ilp
from pipeplan.solvers.result import Result, Status


def _problem(seed: int, layers: int) -> tuple[brute_force.Instance, Problem]:
    """A random problem; the few that are refused (no work at all, stages beyond the layers) are drawn again."""
    for attempt in range(100):
        instance = random_instance(seed + 1_000_000 * attempt, layers=layers)
        try:
            return instance, to_problem(instance)
        except InputError:
            continue
    raise AssertionError("no valid instance in 100 draws")


def _agrees(result: Result, expected: float, problem: Problem) -> None:
    if math.isinf(expected):
        assert result.status == Status.INFEASIBLE
        assert result.plan is None
        return
    assert result.status == Status.OPTIMAL
    assert result.plan is not None
    assert result.objective_s == pytest.approx(expected, rel=1e-6)
    assert result.bound_s == pytest.approx(expected, rel=1e-6)
    score = evaluate(result.plan, problem)
    assert score.fits
    assert score.alone_s == pytest.approx(expected, rel=1e-6)


def _check(seed: int, layers: int) -> None:
    instance, problem = _problem(seed, layers)
    expected = brute_force.best(instance)
    first = dp.solve(problem, enumerate_cuts(problem, 10_000))
    _agrees(first, expected, problem)
    _agrees(ilp.solve(problem, ilp.Limits()), expected, problem)
    if first.plan is not None:
        _agrees(ilp.solve(problem, ilp.Limits(), cutoff_s=first.objective_s), expected, problem)


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_dp_and_ilp_find_what_brute_force_finds(start: int) -> None:
    for seed in range(start, start + 20):
        _check(seed, layers=5)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 11_200, 50))
def test_dp_and_ilp_find_what_brute_force_finds_at_length(start: int) -> None:
    for seed in range(start, start + 50):
        _check(seed, layers=7)


def test_cbc_agrees_with_brute_force_too() -> None:
    for seed in range(300, 306):
        instance, problem = _problem(seed, 5)
        _agrees(ilp.solve(problem, ilp.Limits(solver="cbc")), brute_force.best(instance), problem)


def test_an_infeasible_verdict_of_presolve_is_checked() -> None:
    # HiGHS 1.15 with presolve calls this program infeasible below the cut-off, and finds a plan without.
    instance, problem = _problem(20611, 5)
    best = dp.solve(problem, enumerate_cuts(problem, 10_000))
    _agrees(ilp.solve(problem, ilp.Limits(), cutoff_s=best.objective_s), brute_force.best(instance), problem)


def test_a_cutoff_that_is_too_low_is_noticed() -> None:
    _, problem = _problem(1, 5)
    best = dp.solve(problem, enumerate_cuts(problem, 10_000))
    result = ilp.solve(problem, ilp.Limits(), cutoff_s=best.objective_s * 0.9)
    assert result.status == Status.INFEASIBLE


def test_a_cutoff_that_is_too_high_is_beaten() -> None:
    _, problem = _problem(1, 5)
    best = dp.solve(problem, enumerate_cuts(problem, 10_000))
    result = ilp.solve(problem, ilp.Limits(), cutoff_s=best.objective_s * 3)
    assert result.objective_s == pytest.approx(best.objective_s, rel=1e-6)


def _objective(problem: Problem) -> float:
    return dp.solve(problem, enumerate_cuts(problem, 10_000)).objective_s


def _faster_links(cluster: Cluster) -> Cluster:
    levels = tuple(
        replace(level, bandwidth=2 * level.bandwidth, latency_s=level.latency_s / 2) for level in cluster.levels
    )
    return replace(cluster, levels=levels)


def _more_memory(cluster: Cluster) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=2 * cluster.device.memory_bytes))


def _one_more_server(cluster: Cluster) -> Cluster:
    top = cluster.levels[-1]
    return replace(cluster, levels=(*cluster.levels[:-1], replace(top, count=top.count + 1)))


@pytest.mark.parametrize("better", [_faster_links, _more_memory, _one_more_server])
def test_a_better_cluster_is_never_worse(better: object) -> None:
    for seed in range(400, 430):
        _, problem = _problem(seed, 6)
        # Copies of a pipeline fill the whole cluster, so that one more server may take that space away.
        problem = replace(problem, options=replace(problem.options, allow_copies=False))
        improved = problem.within(better(problem.cluster))  # type: ignore[operator]
        assert _objective(improved) <= _objective(problem) * (1 + 1e-9)


def test_scaling_all_times_scales_the_answer() -> None:
    for seed in range(440, 460):
        _, problem = _problem(seed, 6)
        profile = problem.profile
        layers = tuple(replace(y, forward_s=3 * y.forward_s, backward_s=3 * y.backward_s) for y in profile.layers)
        levels = tuple(replace(v, bandwidth=v.bandwidth / 3, latency_s=3 * v.latency_s) for v in problem.cluster.levels)
        slower = Problem(replace(profile, layers=layers), replace(problem.cluster, levels=levels), problem.options)
        assert _objective(slower) == pytest.approx(3 * _objective(problem), rel=1e-9)


def test_the_order_and_names_of_layers_do_not_matter() -> None:
    for seed in range(460, 480):
        _, problem = _problem(seed, 6)
        assert _objective(Problem(_relabelled(problem.profile, seed), problem.cluster, problem.options)) == (
            pytest.approx(_objective(problem), rel=1e-12)
        )


def _relabelled(profile: Profile, seed: int) -> Profile:
    rng = random.Random(seed)
    names = [f"n{number}" for number in rng.sample(range(100), len(profile.layers))]
    new = dict(zip((layer.name for layer in profile.layers), names, strict=True))
    layers = [replace(layer, name=new[layer.name]) for layer in profile.layers]
    tensors = [
        replace(t, producer=new[t.producer], consumers=tuple(new[c] for c in t.consumers)) for t in profile.tensors
    ]
    rng.shuffle(layers)
    rng.shuffle(tensors)
    together = tuple(tuple(new[name] for name in group) for group in profile.together)
    return replace(profile, layers=tuple(layers), tensors=tuple(tensors), together=together)


def test_the_same_problem_gives_the_same_plan() -> None:
    for seed in range(480, 490):
        _, problem = _problem(seed, 6)
        plans = {str(dp.solve(problem, enumerate_cuts(problem, 10_000)).plan) for _ in range(2)}
        assert len(plans) == 1


def test_a_graph_with_too_many_cuts_is_still_proven_by_the_ilp() -> None:
    for seed in range(500, 510):
        instance, problem = _problem(seed, 5)
        expected = brute_force.best(instance)
        if math.isinf(expected):
            continue
        outcome = solve(problem, Settings(maximum_cuts=1))
        assert outcome.evaluation.alone_s == pytest.approx(expected, rel=1e-6)
