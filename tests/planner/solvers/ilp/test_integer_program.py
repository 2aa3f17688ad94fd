"""The integer program against brute force under every option that it expresses, where it stops, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import brute_force
import pytest
from extents import first_few
from instances import crowded_instance, drawn, mixed_instance, random_instance
from solver_contract import assert_proves, check_ilp, solve_by_ilp

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.ilp import backend, integer_program, space_search
from pipeplan.solvers.result import Status

EXPRESSED = ("1f1b-stashing", "2bw", "gpipe", "1f1b-flush")


def chain(count: int, *, saved: int = 0, seed: int = 1) -> Profile:
    """Layers in a row with uneven work, tensors and parameters."""
    layers = tuple(
        Layer(f"l{i}", 1e-3 * (1 + (7 * i + seed) % 5), 2e-3 * (1 + (3 * i) % 4), 4000 * (1 + i % 3), saved)
        for i in range(count)
    )
    tensors = tuple(
        Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), 1000 * (1 + i % 4), 1000 * (1 + i % 4)) for i in range(count - 1)
    )
    return Profile(layers=layers, tensors=tensors, minibatch=1)


def cluster(*levels: tuple[int, float], memory: int = 1 << 40) -> Cluster:
    """Levels by count and bandwidth."""
    return Cluster("c", Device("d", "cpu", memory), tuple(Level(f"n{i}", *level) for i, level in enumerate(levels)))


@pytest.mark.parametrize("schedule", EXPRESSED)
@pytest.mark.parametrize("seeds", first_few(range(12), 2))
def test_it_finds_what_brute_force_finds_under_all_options(schedule: str, seeds: range) -> None:
    for seed in seeds:
        instance, problem = drawn(seed, lambda number: mixed_instance(number, layers=4, schedule=schedule))
        expected = brute_force.best(instance)
        assert_proves(solve_by_ilp(problem), expected, problem)
        if not math.isinf(expected):
            assert_proves(solve_by_ilp(problem, expected), expected, problem)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", EXPRESSED)
@pytest.mark.parametrize("start", [12, *range(1000, 1200, 50)])
def test_it_finds_what_brute_force_finds_under_all_options_at_length(schedule: str, start: int) -> None:
    for seed in range(start, start + 50):
        instance, problem = drawn(seed, lambda number: mixed_instance(number, layers=5, schedule=schedule))
        assert_proves(solve_by_ilp(problem), brute_force.best(instance), problem)


def test_a_program_that_highs_fails_on_with_presolve_is_solved_without() -> None:
    # HiGHS 1.16 with presolve ends with a "Solve error" in the first space of plans.
    instance, problem = drawn(1100, lambda number: mixed_instance(number, layers=5, schedule="gpipe"))
    assert_proves(solve_by_ilp(problem), brute_force.best(instance), problem)


def test_a_search_that_the_solver_fails_on_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = backend.MilpOutcome(found=False, proven=False, bound=0.0, failure="HiGHS ended with: Solve error")
    monkeypatch.setattr(backend, "run", lambda *arguments, **named: failed)
    result = solve_by_ilp(Problem(chain(6), cluster((2, 1e6), (2, 1e5))))
    assert result.status != Status.OPTIMAL
    assert result.note == "HiGHS ended with: Solve error"


@pytest.mark.parametrize("seeds", first_few(range(60), 5))
def test_vertical_sync_is_solved_where_memory_limits_the_versions(seeds: range) -> None:
    limited = 0
    for seed in seeds:
        instance, problem = drawn(seed, lambda number: mixed_instance(number, layers=4, schedule="vertical-sync"))
        limited += not math.isinf(instance.memory)
        assert_proves(solve_by_ilp(problem), brute_force.best(instance), problem)
    assert limited


@pytest.mark.parametrize(("schedule", "seed"), [("vertical-sync", 137), ("1f1b-flush", 119)])
def test_a_stage_covers_the_minibatches_in_flight_behind_it(schedule: str, seed: int) -> None:
    """The fastest stages do not fit in memory with the depths that the stages behind them ask for."""
    instance, problem = drawn(seed, lambda number: crowded_instance(number, layers=5, schedule=schedule))
    free = replace(instance, contention=False), replace(problem, options=replace(problem.options, contention=False))
    check_ilp(*free, ["cold", "bounded"])


def test_parallel_links_are_those_of_the_boundary_not_of_the_workers_before_it() -> None:
    # 2-2 over parallel links: the cut behind the first of two replicas is the boundary behind both.
    instance, problem = drawn(14, lambda number: mixed_instance(number, layers=5, schedule="gpipe"))
    assert instance.boundary == "parallel"
    result = solve_by_ilp(problem)
    assert_proves(result, brute_force.best(instance), problem)
    assert result.plan is not None
    assert result.plan.config == "2-2"


def test_a_solution_that_is_worse_than_the_optimum_stated_with_it_is_not_believed() -> None:
    # HiGHS 1.15 with presolve calls the slower of two plans of this problem optimal, beside the faster one's objective.
    instance, problem = drawn(612, lambda number: random_instance(number, layers=6))
    assert_proves(solve_by_ilp(problem), brute_force.best(instance), problem)


def test_the_smallest_layer_counts_beside_a_large_memory() -> None:
    # HiGHS drops coefficients below 1e-9. A byte or two of a device's memory are less: the sum over all layers, taken
    # at once, was then more than the sum over the layers, and everything infeasible.
    profile = chain(4, saved=1 << 30)
    tiny = replace(profile.layers[1], saved_bytes=2)
    profile = replace(profile, layers=(profile.layers[0], tiny, *profile.layers[2:]))
    problem = Problem(profile, cluster((2, 1e6), memory=6 << 30), Options())
    result = solve_by_ilp(problem)
    assert result.status == Status.OPTIMAL
    assert result.plan is not None
    assert evaluate(result.plan, problem).fits


def hard() -> Problem:
    """A problem that HiGHS cannot finish in a second: memory binds, and depths matter."""
    options = Options(recompute=False)
    return Problem(chain(24, saved=40_000), cluster((4, 2e6), (2, 4e5), memory=230_000), options)


def test_a_time_limit_leaves_a_bound_that_holds() -> None:
    problem = hard()
    result = integer_program.solve(problem, integer_program.IlpLimits(seconds=0.5))
    assert result.status != Status.OPTIMAL
    assert result.bound_s > 0
    assert result.bound_s >= problem.work_s / problem.cluster.workers * (1 - 1e-9)
    if result.plan is not None:
        assert result.bound_s <= evaluate(result.plan, problem).step_time_s


def test_ctrl_c_while_the_program_is_written_down_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    problem = Problem(chain(6), cluster((2, 1e6), (2, 1e5)))
    best = solve_by_ilp(problem)
    monkeypatch.setattr(space_search, "ColumnProgram", interrupted)
    result = solve_by_ilp(problem)
    assert result.interrupted
    assert result.status == Status.FEASIBLE
    assert problem.work_s / 4 <= result.bound_s <= best.objective_s


def test_ctrl_c_ends_the_search_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(chain(6), cluster((2, 1e6), (2, 1e5)))
    best = solve_by_ilp(problem)
    asked = []

    def interrupted(*arguments: object, **named: object) -> backend.MilpOutcome:
        asked.append(arguments)
        return backend.MilpOutcome(found=False, proven=False, bound=0.0, interrupted=True)

    monkeypatch.setattr(backend, "run", interrupted)
    result = solve_by_ilp(problem)
    assert len(asked) == 1
    assert result.interrupted
    assert result.note == "it was stopped by Ctrl-C"
    assert result.status == Status.FEASIBLE, "plain data parallelism is known without any search"
    assert result.plan is not None
    assert result.plan.config == "4"
    assert result.objective_s == pytest.approx(evaluate(result.plan, problem).step_time_s)
    assert problem.work_s / 4 <= result.bound_s <= best.objective_s


def test_a_gap_is_a_promise() -> None:
    for seed in range(3):
        instance, problem = drawn(seed, lambda number: mixed_instance(number, layers=4, schedule="1f1b-stashing"))
        expected = brute_force.best(instance)
        result = integer_program.solve(problem, integer_program.IlpLimits(gap=0.1))
        if math.isinf(expected):
            continue
        assert result.plan is not None
        assert result.bound_s <= expected * (1 + 1e-6)
        assert evaluate(result.plan, problem).step_time_s * (1 - 0.1) <= result.bound_s * (1 + 1e-6)


def test_work_is_counted_in_what_the_devices_take_for_it() -> None:
    # By the time at speed 1, coefficients of devices a million times as fast are so small that HiGHS drops them.
    layers = (
        Layer("a", 1.0, 2.0, 100, 10),
        Layer("b", 0.5, 1.0, 0, 4),
        Layer("c", 0.25, 0.5, 4_194_304, 6),
    )
    tensors = (Tensor("t0", "a", ("b",), 8, 8), Tensor("t1", "b", ("c",), 4096, 4))
    profile = Profile(layers=layers, tensors=tensors, minibatch=1, optimizer_state_ratio=1.0)
    levels = (Level("server", 2, 12e9), Level("cluster", 2, 1.25e9, 50e-6, allreduce_efficiency=0.6))
    cluster = Cluster("fast", Device("d", "cuda", 1 << 26, speed=1e6), levels)
    problem = Problem(profile, cluster, Options(contention=False))
    result = solve_by_ilp(problem)
    assert result.plan is not None
    assert evaluate(result.plan, problem).step_time_s == pytest.approx(result.objective_s, rel=1e-6)


def test_a_boundary_of_parallel_links_carries_more_than_one_link_does() -> None:
    """Within the step time of the best plan one link carries 18 bytes, and two of them the 28 that cross its cut."""
    layers = (Layer("l0", 7, 3, 60, 45), Layer("l1", 4, 4, 20, 120), Layer("l2", 6, 0, 20, 37))
    tensors = (Tensor("a", "l0", ("l1", "l2"), 16, 28), Tensor("b", "l1", ("l2",), 17, 47))
    cluster = Cluster("test", Device("d", "cpu", 1), (Level("server", 4, 4.0, 0.0, 0.8, 0.5),))
    options = Options(memory=False, stages=2, boundary="parallel", contention=False)
    problem = Problem(Profile(layers, tensors, minibatch=1), cluster, options)
    # Stage 1 averages 60 bytes between two, at 3.2 a second and once for two minibatches; all else takes 7 s at most.
    step_time_s = 2 * (2 - 1) / 2 * 60 / 3.2 / 2
    found = solve_by_ilp(problem, step_time_s)
    assert found.status == Status.OPTIMAL
    assert found.objective_s == pytest.approx(step_time_s, rel=1e-6)
