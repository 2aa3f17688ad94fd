"""The fewest workers: as many as trying every number finds."""

from __future__ import annotations

import random

import pytest
from extents import slow_but_for

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.planning.fast import best_plan
from pipeplan.planning.fewest_workers import on_at_most, search_fewest_workers
from pipeplan.planning.settings import Settings
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

DP = Settings(solver="dp", simulate=False)


def _problem(seed: int, options: Options | None = None) -> Problem:
    rng = random.Random(seed)
    layers = tuple(Layer(f"l{i}", rng.uniform(1, 5), rng.uniform(2, 9), rng.choice([5, 50, 500]), 3) for i in range(5))
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), size := rng.randint(1, 40), size) for i in range(4))
    levels = (Level("server", 3, 60.0), Level("cluster", 2, 15.0))
    cluster = Cluster("c", Device("chip", "cuda", 10**6), levels)
    return Problem(Profile(layers, tensors, 1), cluster, options or Options(contention=False))


@pytest.mark.parametrize("within", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("seed", slow_but_for(range(2), range(5)))
def test_it_is_what_trying_every_number_finds(seed: int, within: float) -> None:
    problem = _problem(seed)
    cuts = enumerate_cuts(problem, 2000)
    paces = [found.pace_s for n in range(1, 7) if (found := best_plan(on_at_most(problem, n), cuts)) is not None]
    assert len(paces) == 6
    expected = next(n for n, pace in enumerate(paces, start=1) if pace <= paces[-1] * (1 + within) * (1 + 1e-9))
    found = search_fewest_workers(problem, within, DP)
    assert (found.workers, found.outcome.plan.busy) == (expected, expected)
    assert found.slower <= within + 1e-9
    assert found.best.evaluation.pace_s == pytest.approx(paces[-1])
    if expected > 1:
        assert found.fewer_s == pytest.approx(paces[expected - 2])
    else:
        assert found.fewer_s is None


def test_both_solvers_agree_about_the_plan_on_so_few() -> None:
    found = search_fewest_workers(_problem(1), 0.3, Settings(solver="both"))
    assert found.outcome.verdict.proven
    assert found.outcome.problem.options.max_workers == found.workers or found.outcome is found.best


def test_the_number_of_stages_is_kept() -> None:
    found = search_fewest_workers(_problem(2, Options(stages=3, contention=False)), 1.0, DP)
    assert len(found.outcome.plan.stages) == 3
    assert found.fewer_s is not None
    assert (found.workers, found.fewer_s > 2 * found.best.evaluation.pace_s) == (4, True)


def test_no_plan_at_all_and_a_share_that_is_none() -> None:
    for share, complaint in (
        (-0.1, r"at least 0 and at most 1, not -0\.1$"),
        (5, r"not 5; did you mean 0\.05, which is 5%"),
    ):
        with pytest.raises(InputError, match=complaint):
            search_fewest_workers(_problem(0), share, DP)
    small = _problem(0)
    tiny = small.within(Cluster("c", Device("chip", "cuda", 10), small.cluster.levels))
    with pytest.raises(InfeasibleError):
        search_fewest_workers(tiny, 0.1, DP)
