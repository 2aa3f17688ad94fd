"""What the integer program is made of: the model's cuts, the places of stages, and the columns within a step time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from extents import first_few
from instances import ALL_SCHEDULES, drawn, mixed_instance, tied_instance
from long_chains import long_chain
from solver_contract import solve_by_dp, solve_by_ilp

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.stage_table import SUMS
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp import cut_table
from pipeplan.solvers.ilp.columns import ColumnFactory, Columns
from pipeplan.solvers.ilp.cut_table import CutTable
from pipeplan.solvers.ilp.enumeration import ColumnEnumeration
from pipeplan.solvers.ilp.places import Places
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.util.deadline import NO_DEADLINE


def test_both_solvers_have_the_same_cuts_with_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They find them in different ways."""
    for seed in range(12):
        _, problem = drawn(seed, lambda one: (mixed_instance, tied_instance)[one % 2](one, layers=7))
        theirs, table = enumerate_cuts(problem, 10_000), CutTable.of(problem)
        assert table is not None
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
    return Problem(profile, cluster, Options(overlap=1.0, **options))  # type: ignore[arg-type]


def _columns(problem: Problem, step_time_s: float, among: Columns | None = None) -> tuple[Columns, ColumnFactory]:
    """The columns within a step time, in the space of plans without copies."""
    space = next(space for space in plan_spaces(problem) if space.copies == 1)
    cuts = CutTable.of(problem)
    assert cuts is not None
    factory = ColumnFactory(problem, space, cuts, Places(space.inner(problem), None))
    time_s = space.inner_step_time(problem, step_time_s)
    assert time_s is not None
    return ColumnEnumeration(factory, NO_DEADLINE).within(time_s, step_time_s, among), factory


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


@pytest.mark.parametrize("seeds", first_few(range(8), 4))
def test_columns_of_a_step_time_are_found_among_those_of_a_slower_one(seeds: range) -> None:
    for seed in seeds:
        for schedule in ALL_SCHEDULES:
            _, problem = drawn(seed, lambda one: mixed_instance(one, layers=5, schedule=schedule))  # noqa: B023
            best = solve_by_dp(problem)
            if best.plan is None or best.plan.copies > 1:
                continue
            wide, _ = _columns(problem, best.objective_s * 1.5)
            alone, _ = _columns(problem, best.objective_s * 1.01)
            among, _ = _columns(problem, best.objective_s * 1.01, wide)
            assert among.keys.tolist() == alone.keys.tolist()
            assert len(alone) <= len(wide)


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
        assert cuts is not None
        if cuts.work_s.argmax() < cuts.last:
            ended += 1
            columns, factory = _columns(problem, 1.0)
            whole = factory.places.stop[columns.place] == factory.places.workers
            assert whole.any()
            assert (columns.end[whole] == factory.last).all()
    assert ended, "no sum of these layers is rounded so"
