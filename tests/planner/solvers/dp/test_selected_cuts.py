"""A fast plan on few cuts first, and the bounds on workers that prune the search."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from brute_machines import Instance
from extents import first_few
from instances import drawn, mixed_instance
from solver_contract import check_solvers

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.planning.settings import ProgressTracker, SolveProgress
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import cut_selection, dynamic_program, pipeline_searches
from pipeplan.solvers.dp.budget import SearchLimits
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.stage_terms import StageTerms
from pipeplan.solvers.dp.search.states import undominated_rows
from pipeplan.solvers.dp.search.uniform_search import UniformSearch
from pipeplan.solvers.dp.search.worker_bounds import WorkerBounds

FLUSHING = ("gpipe", "1f1b-flush")


def _problem(seed: int, schedule: str) -> tuple[Instance, Problem]:
    return drawn(seed, lambda one: replace(mixed_instance(one, layers=5, schedule=schedule), recompute=one % 3 > 0))


def _long_problem() -> Problem:
    """A chain of 60 layers on 12 workers, with memory for a part of it."""
    rng = random.Random(7)
    layers = tuple(
        Layer(f"l{i}", rng.uniform(1, 2), rng.uniform(1, 4), rng.randint(0, 80), rng.randint(0, 60)) for i in range(60)
    )
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), rng.randint(1, 20), rng.randint(1, 20)) for i in range(59))
    levels = (Level("server", 4, 100.0, 0.0), Level("cluster", 3, 20.0, 0.1))
    whole = sum(layer.parameter_bytes * 4 + layer.saved_bytes for layer in layers)
    cluster = Cluster("c", Device("d", "cuda", int(0.35 * whole)), levels)
    profile = Profile(layers=layers, tensors=tensors, minibatch=1, optimizer_state_ratio=1.0)
    return Problem(profile, cluster, Options(overlap=1.0, contention=False))


@pytest.mark.parametrize("seeds", first_few(range(400), 3))
@pytest.mark.parametrize("schedule", FLUSHING)
def test_plans_on_few_cuts_first_change_no_answer(schedule: str, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_selection, "SELECTED_CUTS", 1)
    for seed in seeds:
        check_solvers(*_problem(seed, schedule))


@pytest.mark.parametrize("seeds", first_few(range(400), 2))
@pytest.mark.parametrize("schedule", ["1f1b-stashing", "vertical-sync", "2bw"])
def test_a_plan_that_is_improved_on_few_cuts_changes_no_answer(
    schedule: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_selection, "SELECTED_CUTS", 1)
    monkeypatch.setattr(cut_selection, "_PART", 0.75)
    monkeypatch.setattr(pipeline_searches, "_REFINED_CUTS", 0)
    for seed in seeds:
        check_solvers(*_problem(seed, schedule))


def test_improvement_takes_smaller_steps_until_nothing_is_found() -> None:
    """The results near x are all numbers from x - 3 on, and none is below 90."""

    def find(around: float, limit: float) -> tuple[float, float] | None:
        best = max(around - 3, 90.0)
        return None if best > limit else (best, best)

    told: list[float] = []
    best, _ = cut_selection.refined_result(find, (100.0, 100.0), 0.0, told.append)
    assert (best, told) == (90.0, [97.0, 94.0, 91.0, 90.0])
    assert cut_selection.refined_result(find, (100.0, 100.0), 95.0, told.append)[0] == 94.0
    assert cut_selection.refined_result(find, (100.0, 100.0), 100.0, told.append)[0] == 100.0


def test_one_search_right_below_the_best_ends_an_improvement_that_finds_nothing() -> None:
    limits: list[float] = []

    def find(around: float, limit: float) -> None:
        limits.append(limit)

    cut_selection.refined_result(find, (100.0, 100.0), 0.0, lambda step_time: None)
    assert len(limits) == 2
    assert limits[1] == pytest.approx(100.0, rel=1e-5)


@pytest.mark.parametrize("latency_s", [0.0, 1e-3])
@pytest.mark.parametrize("recompute", [False, True])
def test_selected_stages_have_the_terms_of_the_same_stages_alone(latency_s: float, recompute: bool) -> None:
    rng = random.Random(1)
    layers = tuple(Layer(f"l{i}", rng.random(), rng.random(), rng.randint(1, 9), 3) for i in range(6))
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), 2, 2) for i in range(5))
    cluster = Cluster("c", Device("d", "cuda", 100), (Level("server", 4, 20.0, latency_s), Level("all", 2, 9.0, 0.0)))
    problem = Problem(Profile(layers=layers, tensors=tensors, minibatch=1), cluster, Options())
    terms = CostTerms(problem, enumerate_cuts(problem, 100))
    rows, targets = np.array([0, 2, 3]), np.arange(5)
    whole, alone = (StageTerms.of(terms, 5, some, recompute=recompute) for some in (targets, targets[rows]))
    at_least = np.ones((3, 3))
    whole.allowed(1.0)
    whole.deepest(replicated=True)
    taken = whole.take(rows)
    assert np.array_equal(taken.allowed(1.0).least(at_least), alone.allowed(1.0).least(at_least))
    for replicated in (False, True):
        assert np.array_equal(taken.deepest(replicated=replicated), alone.deepest(replicated=replicated))
    for replicas in (1, 3):
        fixed, of_alone = (one.fixed_bytes(np.full(3, replicas)) for one in (taken, alone))
        assert np.array_equal(fixed, of_alone)
    assert np.array_equal(taken.growing_bytes, alone.growing_bytes)


def test_a_model_of_many_layers_only_gets_better_and_begins_with_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that refines its plan reports step times that fall and bounds that rise, whatever the clock."""
    monkeypatch.setattr(cut_selection, "_PART", 0.6)
    monkeypatch.setattr(pipeline_searches, "_REFINED_CUTS", 0)
    problem = _long_problem()
    told: list[SolveProgress] = []
    cuts, tracker = enumerate_cuts(problem, 1000), ProgressTracker(told.append)
    result = dynamic_program.solve(problem, cuts, report=tracker.narrowed)
    assert result.status == "optimal"
    bounds = [one.bound_s or 0.0 for one in told]
    step_times = [one.best_s or float("inf") for one in told]
    assert list(step_times) == sorted(step_times, reverse=True)
    assert list(bounds) == sorted(bounds)
    # A plan is known before it is the best, and a bound before it is the step time.
    assert len(set(step_times)) > 2
    assert (
        next(bound for bound, step_time in zip(bounds, step_times, strict=True) if step_time < float("inf"))
        < bounds[-1]
    )
    assert bounds[-1] == pytest.approx(step_times[-1], rel=1e-8)


@pytest.mark.parametrize("seeds", first_few(range(600), 25))
def test_the_bounds_on_workers_change_no_answer(seeds: range) -> None:
    """A search that needs the states of all cuts leaves them out, so it is the reference."""
    differing = 0
    for seed in seeds:
        schedule = ("1f1b-stashing", "2bw")[seed % 2]
        _, problem = drawn(seed, lambda one, named=schedule: mixed_instance(one, layers=6, schedule=named))
        terms = CostTerms(problem, enumerate_cuts(problem, 1000))
        rng = random.Random(seed)
        for _ in range(4):
            threshold = terms.floor * rng.uniform(1.0, 4.0)
            limits = SearchLimits(memory=True, recompute=rng.random() < 0.5)
            bounded = UniformSearch(terms, threshold, limits)
            reference = UniformSearch(terms, threshold, replace(limits, every_cut=True))
            assert (bounded.run() is None) == (reference.run() is None)
            pruned = sum(len(states) for states in bounded.kept.values())
            differing += pruned < sum(len(states) for states in reference.kept.values())
    assert differing > 0


def test_scarce_memory_and_scarce_time_add_up() -> None:
    """Each alone would do with few workers; together they need more than either says."""
    _, drawn_problem = drawn(3, lambda one: mixed_instance(one, layers=6, schedule="1f1b-flush"))
    problem = replace(drawn_problem, options=replace(drawn_problem.options, memory=True))
    terms = CostTerms(problem, enumerate_cuts(problem, 1000))
    last, demand = np.array([len(terms.cuts.ideals) - 1]), np.array([8.0])
    rate = 4 / float(terms.cuts.work_s[-1]) * terms.speed
    keeping, recomputing = (
        float(WorkerBounds(terms, rate, recompute=recompute).at(last, demand)[0]) for recompute in (False, True)
    )
    idle = float(WorkerBounds(terms, 0.0, recompute=True).at(last, demand)[0])
    assert keeping >= recomputing >= max(4.0, idle)
    assert (np.diff(WorkerBounds(terms, rate, recompute=True).at(last, np.arange(2000.0))) >= 0).all()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 700])
def test_no_kept_row_loses_to_another_and_every_lost_row_does(count: int) -> None:
    points = np.random.default_rng(count).integers(0, 12, (count, 3))
    points = points[np.lexsort(points.T[::-1])]

    def dominates(some: np.ndarray, others: np.ndarray) -> np.ndarray:
        return (points[some][:, None] <= points[others][None]).all(axis=2)

    kept = undominated_rows(count, dominates)
    every = np.arange(count)
    earlier = np.triu(dominates(every, every), 1) if count else np.zeros((0, 0), dtype=bool)
    assert kept.tolist() == np.flatnonzero(~earlier.any(axis=0)).tolist()
