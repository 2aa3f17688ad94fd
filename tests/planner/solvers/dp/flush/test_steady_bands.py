"""The search for the fastest batch by bands of its steady part."""

from __future__ import annotations

import brute_force
import pytest
from extents import first_few
from instances import drawn, mixed_instance
from solver_contract import assert_proves, solve_by_dp

from pipeplan.solvers.dp.flush import steady_bands
from pipeplan.solvers.dp.flush.uniform_flush import FlushSearch


@pytest.mark.parametrize("seeds", first_few(range(2100, 2160), 12))
@pytest.mark.parametrize("width", [0.02, 0.2])
def test_bands_lose_no_batch(seeds: range, width: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_bands, "_FEWEST_CUTS", 0)
    monkeypatch.setattr(steady_bands, "WIDTH", width)
    searched = []

    class Counted(FlushSearch):
        def run(self) -> object:
            searched.append((self.batch.limit_s, self.batch.steady_from_s))
            return super().run()

    monkeypatch.setattr(steady_bands, "FlushSearch", Counted)
    for seed in seeds:
        instance, problem = drawn(seed, lambda one: mixed_instance(one, layers=5, schedule="1f1b-flush"))
        assert_proves(solve_by_dp(problem), brute_force.best(instance), problem)
    assert len({steady for _, steady in searched}) > len(seeds), "chosen so that there are several bands"
