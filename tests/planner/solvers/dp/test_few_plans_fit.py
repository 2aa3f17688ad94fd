"""Batches where memory is so tight that few plans fit: some plan is found soon, however slow."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from extents import first_few
from instances import drawn, mixed_instance, unequal_instance

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.pipeline_searches import PipelineSearches
from pipeplan.solvers.dp.spaces import BatchSpaces
from pipeplan.solvers.dp.threshold import BisectionResult
from pipeplan.solvers.result import Status


def _tight() -> Problem:
    """Sixty layers, of which no two fit on one worker with all minibatches of an early stage in flight."""
    layers = tuple(Layer(f"l{index}", 1.0, 2.0, 10, 10) for index in range(60))
    tensors = tuple(Tensor(f"t{a.name}", a.name, (b.name,), 1, 1) for a, b in itertools.pairwise(layers))
    cluster = Cluster("tight", Device("d", "cuda", 450), (Level("server", 8, 100.0), Level("cluster", 4, 10.0)))
    options = Options(schedule="1f1b-flush", accumulate=64, recompute=False, allow_copies=False)
    return Problem(Profile(layers, tensors, 1), cluster, options)


def test_a_search_that_ends_early_has_a_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_early(_: BatchSpaces, low: float, *, memory: bool) -> BisectionResult[object]:
        return BisectionResult(low, finished=False)

    monkeypatch.setattr(BatchSpaces, "_refined", ends_early)
    problem = _tight()
    found = dynamic_program.solve(problem, enumerate_cuts(problem, 1000), seconds=60.0)
    assert found.status == Status.FEASIBLE
    assert found.plan is not None
    assert len(found.plan.stages) > 8
    assert evaluate(found.plan, problem).fits


@pytest.mark.parametrize("seeds", first_few(range(60), 12))
def test_a_plan_that_fits_is_found_where_there_is_any(seeds: range) -> None:
    both = set()
    for seed in seeds:
        draw = unequal_instance if seed % 2 else mixed_instance
        _, problem = drawn(seed, lambda number: draw(number, layers=5, schedule="1f1b-flush"))  # noqa: B023
        cuts = enumerate_cuts(problem, 1000)
        any_fits = dynamic_program.is_feasible(problem, cuts)
        assert any_fits == (dynamic_program.solve(problem, cuts).plan is not None), seed
        if any_fits and problem.options.memory and not problem.options.pins:
            found = PipelineSearches(problem, cuts).fitting(None)
            assert found is None or found[1].fits(PipelineSearches(problem, cuts).limited, found[0]), seed
        both.add(any_fits)
    assert both == {True, False}


def test_few_searches_say_that_no_plan_of_one_stage_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, searches, find = _tight(), [], BatchSpaces._find

    def counted(spaces: BatchSpaces, step_time_s: float, *, memory: bool, coarse: bool) -> object:
        searches.append(step_time_s)
        return find(spaces, step_time_s, memory=memory, coarse=coarse)

    monkeypatch.setattr(BatchSpaces, "_find", counted)
    alone = Problem(problem.profile, problem.cluster, replace(problem.options, stages=1))
    assert dynamic_program.solve(alone, enumerate_cuts(alone, 1000)).status == Status.INFEASIBLE
    assert 0 < len(searches) <= 4
