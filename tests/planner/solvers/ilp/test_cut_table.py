"""The integer program's table of cuts, compared with that of the dynamic program, which finds cuts in another way."""

from __future__ import annotations

import numpy as np
import pytest
from instances import drawn, mixed_instance, tied_instance

from pipeplan.cost.stage_table import SUMS
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.solvers.ilp import cut_table
from pipeplan.solvers.ilp.cut_table import CutTable


def test_both_solvers_have_the_same_cuts_with_the_same_figures() -> None:
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


def test_a_model_with_too_many_cuts_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    _, problem = drawn(3, lambda one: mixed_instance(one, layers=7))
    monkeypatch.setattr(cut_table, "MOST_CUTS", len(problem.units))
    assert CutTable.of(problem) is None
