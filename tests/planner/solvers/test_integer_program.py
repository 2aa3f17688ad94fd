"""What the integer program is made of and charges, where it stops, and numbers that HiGHS has trouble with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import brute_force
import numpy as np
import pytest
from brute_machines import Instance
from instances import drawn, mixed_instance, tied_instance, to_problem
from long_chains import chain, long_chain
from solver_contract import check_ilp, solve_by_dp, solve_by_ilp

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE, evaluate
from pipeplan.cost.stage_table import SUMS
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.ilp import backend, cut_table, integer_program, space_search
from pipeplan.solvers.ilp.columns import ColumnFactory, Columns
from pipeplan.solvers.ilp.cut_table import CutTable
from pipeplan.solvers.ilp.enumeration import ColumnEnumeration
from pipeplan.solvers.ilp.places import Places
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.solvers.result import Status
from pipeplan.util.deadline import NO_DEADLINE


def uneven(count: int, *, saved: int = 0) -> Profile:
    """Layers in a row with uneven work, tensors and parameters."""
    layers = [
        Layer(f"l{i}", 1e-3 * (1 + (7 * i + 1) % 5), 2e-3 * (1 + (3 * i) % 4), 4000 * (1 + i % 3), saved)
        for i in range(count)
    ]
    return chain(layers, [1000 * (1 + i % 4) for i in range(count - 1)])


def cluster(*levels: tuple[int, float], memory: int = 1 << 40) -> Cluster:
    """Levels by count and bandwidth."""
    return Cluster("c", Device("d", "cpu", memory), tuple(Level(f"n{i}", *level) for i, level in enumerate(levels)))


# What is charged.


def _straddling(**changes: Any) -> Instance:
    """The best plan has two stages, on workers 1 to 2 and 3 to 5: they meet inside the middle one of three servers."""
    layers = [
        {"f": 3.0, "b": 3.0, "w": 10.0, "s": 0.0, "u": 0.0},
        {"f": 5.0, "b": 1.0, "w": 0.0, "s": 0.0, "u": 0.0},
    ]
    fields = {"levels": [(2, 1000.0, 0.0), (3, 6.0, 0.0)], "stages": 2, "boundary": "parallel", "contention": True}
    return Instance(layers, [(0, (1,), 40.0, 19.0)], **(fields | {"allow_copies": False} | changes))


def test_a_boundary_inside_a_server_is_charged_by_the_workers_of_both_stages() -> None:
    instance, alone = _straddling(), _straddling(contention=False)
    charged_s = check_ilp(instance, to_problem(instance), ["cold", "bounded"])
    assert charged_s > check_ilp(alone, to_problem(alone), ["cold"]) * 1.01


@pytest.mark.parametrize("max_replicas", [None, 2])
def test_plain_data_parallelism_waits_for_its_buckets(max_replicas: int | None) -> None:
    """The tensor between the layers is too large for two stages; the gradients fill several buckets."""
    mib = 2.0**20
    layers = [{"f": 1.0, "b": 2.0, "w": 60 * mib, "s": 0.0, "u": 0.0, "t": 0.5} for _ in range(3)]
    tensors = [(0, (1,), 1e10, 1e10), (1, (2,), 1e10, 1e10)]
    levels = [(2, 400 * mib, 0.0), (2, 200 * mib, 0.0)]
    instance = Instance(layers, tensors, levels, max_replicas=max_replicas, contention=True)
    check_ilp(instance, to_problem(instance), ["cold", "bounded"])
    result = solve_by_ilp(to_problem(instance))
    assert evaluate(result.plan, to_problem(instance)).bound == WAITS_FOR_UPDATE


def test_a_boundary_of_parallel_links_carries_more_than_one_link_does() -> None:
    """Within the step time of the best plan one link carries 18 bytes, and two of them the 28 that cross its cut."""
    layers = (Layer("l0", 7, 3, 60, 45), Layer("l1", 4, 4, 20, 120), Layer("l2", 6, 0, 20, 37))
    tensors = (Tensor("a", "l0", ("l1", "l2"), 16, 28), Tensor("b", "l1", ("l2",), 17, 47))
    four = Cluster("test", Device("d", "cpu", 1), (Level("server", 4, 4.0, 0.0, 0.8, 0.5),))
    options = Options(memory=False, stages=2, boundary="parallel", contention=False)
    # Stage 1 averages 60 bytes between two, at 3.2 a second and once for two minibatches; all else takes 7 s at most.
    step_time_s = 2 * (2 - 1) / 2 * 60 / 3.2 / 2
    found = solve_by_ilp(Problem(Profile(layers, tensors, minibatch=1), four, options), step_time_s)
    assert found.status == Status.OPTIMAL
    assert found.objective_s == pytest.approx(step_time_s, rel=1e-6)


# Small numbers beside large ones.


def test_the_smallest_layer_counts_beside_a_large_memory() -> None:
    # HiGHS drops coefficients below 1e-9. A byte or two of a device's memory are less: the sum over all layers, taken
    # at once, was then more than the sum over the layers, and everything infeasible.
    profile = uneven(4, saved=1 << 30)
    tiny = replace(profile.layers[1], saved_bytes=2)
    profile = replace(profile, layers=(profile.layers[0], tiny, *profile.layers[2:]))
    problem = Problem(profile, cluster((2, 1e6), memory=6 << 30), Options())
    result = solve_by_ilp(problem)
    assert result.status == Status.OPTIMAL
    assert evaluate(result.plan, problem).fits


def test_work_is_counted_in_what_the_devices_take_for_it() -> None:
    # By the time at speed 1, coefficients of devices a million times as fast are so small that HiGHS drops them.
    layers = [Layer("a", 1.0, 2.0, 100, 10), Layer("b", 0.5, 1.0, 0, 4), Layer("c", 0.25, 0.5, 4_194_304, 6)]
    levels = (Level("server", 2, 12e9), Level("cluster", 2, 1.25e9, 50e-6, allreduce_efficiency=0.6))
    fast = Cluster("fast", Device("d", "cuda", 1 << 26, speed=1e6), levels)
    problem = Problem(chain(layers, [8, 4096], optimizer_state_ratio=1.0), fast, Options(contention=False))
    result = solve_by_ilp(problem)
    assert evaluate(result.plan, problem).step_time_s == pytest.approx(result.objective_s, rel=1e-6)


# Where it stops.


def test_a_time_limit_leaves_a_bound_that_holds() -> None:
    """Of a problem that HiGHS cannot finish in a second: memory binds, and depths matter."""
    small = cluster((4, 2e6), (2, 4e5), memory=230_000)
    problem = Problem(uneven(24, saved=40_000), small, Options(recompute=False))
    result = integer_program.solve(problem, integer_program.IlpLimits(seconds=0.5))
    assert result.status != Status.OPTIMAL
    assert result.bound_s > 0
    assert result.bound_s >= problem.work_s / problem.cluster.workers * (1 - 1e-9)
    if result.plan is not None:
        assert result.bound_s <= evaluate(result.plan, problem).step_time_s


def test_too_little_time_for_a_proof_leaves_the_largest_step_time_that_was_refuted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance = _straddling(levels=[(4, 6.0, 0.0)])
    best, honest, asked = brute_force.best(instance), backend.run, []

    def late(*arguments: Any, **named: Any) -> backend.MilpOutcome:
        asked.append(arguments)
        if len(asked) == 1:
            return backend.MilpOutcome(found=False, proven=False, bound=0.0)
        return honest(*arguments, **named)

    monkeypatch.setattr(backend, "run", late)
    result = integer_program.solve(to_problem(instance), integer_program.IlpLimits(seconds=1000.0), best)
    assert result.status == Status.TIME_LIMIT
    assert result.bound_s == pytest.approx(0.99 * best, rel=1e-5)


def test_ctrl_c_and_a_failure_leave_data_parallelism_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(uneven(6), cluster((2, 1e6), (2, 1e5)))
    best, asked = solve_by_ilp(problem), []

    def ended(**how: Any) -> Any:
        def run(*arguments: object, **named: object) -> backend.MilpOutcome:
            asked.append(arguments)
            return backend.MilpOutcome(found=False, proven=False, bound=0.0, **how)

        return run

    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    for where, name, replaced, note in (
        (backend, "run", ended(interrupted=True), "it was stopped by Ctrl-C"),
        (space_search, "ColumnProgram", interrupted, "it was stopped by Ctrl-C"),
        (backend, "run", ended(failure="HiGHS ended with: Solve error"), "HiGHS ended with: Solve error"),
    ):
        asked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(where, name, replaced)
            result = solve_by_ilp(problem)
        assert (result.note, result.interrupted) == (note, "Ctrl-C" in note)
        assert result.status == (Status.FEASIBLE if result.interrupted else Status.TIME_LIMIT)
        if result.interrupted:
            assert len(asked) <= 1
            assert result.plan.config == "4", "plain data parallelism is known without any search"
            assert result.objective_s == pytest.approx(evaluate(result.plan, problem).step_time_s)
        assert problem.work_s / 4 <= result.bound_s <= best.objective_s


def test_a_gap_is_a_promise() -> None:
    for seed in range(3):
        instance, problem = drawn(seed, lambda number: mixed_instance(number, layers=4, schedule="1f1b-stashing"))
        expected = brute_force.best(instance)
        result = integer_program.solve(problem, integer_program.IlpLimits(gap=0.1))
        if not math.isinf(expected):
            assert result.bound_s <= expected * (1 + 1e-6)
            assert evaluate(result.plan, problem).step_time_s * (1 - 0.1) <= result.bound_s * (1 + 1e-6)


# What it is made of.


def test_both_solvers_have_the_same_cuts_with_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They find them in different ways."""
    for seed in range(12):
        _, problem = drawn(seed, lambda one: (mixed_instance, tied_instance)[one % 2](one, layers=7))
        theirs, table = enumerate_cuts(problem, 10_000), CutTable.of(problem)
        members = {tuple(theirs.members(0, cut)): cut for cut in range(len(theirs.ideals))}
        order = np.array([members[tuple(table.members(0, cut))] for cut in range(len(table))])
        assert sorted(order) == list(range(len(theirs.ideals)))
        for name in (*SUMS, "sent", "returned"):
            assert getattr(table, name) == pytest.approx(getattr(theirs, name)[order]), (seed, name)
        begin, end = np.nonzero(table.larger)
        between = theirs.workspaces.between(order[end], order[begin])
        assert table.workspaces.between(end, begin).tolist() == between.tolist()
    monkeypatch.setattr(cut_table, "MOST_CUTS", len(problem.units))
    assert CutTable.of(problem) is None, "a model with too many cuts has no table"


def _chain_problem(layers: int = 24, **options: object) -> Problem:
    """A chain on two servers of four workers, each with a quarter of the memory that a single one would need."""
    profile = long_chain(layers, scale=10.0)
    needed = sum(4 * layer.parameter_bytes + layer.saved_bytes for layer in profile.layers)
    cluster = Cluster("c", Device("d", "cuda", needed // 4), (Level("server", 4, 1e10), Level("cluster", 2, 1e9)))
    return Problem(profile, cluster, Options(overlap=1.0, **options))


def _columns(problem: Problem, step_time_s: float) -> tuple[Columns, ColumnFactory]:
    """The columns within a step time, in the space of plans without copies."""
    space = next(space for space in plan_spaces(problem) if space.copies == 1)
    factory = ColumnFactory(problem, space, CutTable.of(problem), Places(space.inner(problem), None))
    time_s = space.inner_step_time(problem, step_time_s)
    return ColumnEnumeration(factory, NO_DEADLINE).within(time_s, step_time_s, None), factory


def test_no_columns_are_left_below_the_best_step_time_of_a_chain() -> None:
    """Where memory binds; where 2bw allows no more in flight than an update has; and under vertical sync."""
    for problem, share in (
        (_chain_problem(), 1 - 1e-6),
        (_chain_problem(schedule="2bw", accumulate=4, memory=False), 1 - 1e-3),
        (_chain_problem(10, schedule="vertical-sync"), 0.98),
    ):
        best = solve_by_dp(problem)
        assert not len(_columns(problem, best.objective_s * share)[0])
        if problem.options.schedule == "2bw":
            # At most four minibatches are in flight, so no more than four workers are busy.
            assert best.objective_s > problem.work_s / 4 * (1 - 1e-6)
        elif problem.options.schedule == "1f1b-stashing":
            assert 0 < len(_columns(problem, best.objective_s * (1 + 1e-6))[0]) < 2_000
            confirmed = solve_by_ilp(problem, best.objective_s)
            assert confirmed.bound_s == pytest.approx(best.objective_s, rel=1e-6)
            assert confirmed.plan is not None


def test_a_plan_ends_at_the_last_cut_where_rounding_gives_another_one_more_work() -> None:
    """A last layer without work, as a loss is, adds to the sum of the work only its rounding."""
    ended = 0
    for layers in range(20, 80):
        profile = long_chain(layers, seed=layers)
        *others, last = profile.layers
        profile = replace(profile, layers=(*others, replace(last, forward_s=0.0, backward_s=0.0)))
        cluster = Cluster("c", Device("d", "cuda", 10**12), (Level("server", 2, 1e10),))
        problem = Problem(profile, cluster, Options(schedule="1f1b-flush", accumulate=4, stages=1, overlap=1.0))
        cuts = CutTable.of(problem)
        if cuts.work_s.argmax() < cuts.last:
            ended += 1
            columns, factory = _columns(problem, 1.0)
            whole = factory.places.stop[columns.place] == factory.places.workers
            assert whole.any()
            assert (columns.end[whole] == factory.last).all()
    assert ended, "no sum of these layers is rounded so"
