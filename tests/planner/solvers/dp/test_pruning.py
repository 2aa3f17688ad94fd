"""What the searches of the dynamic program leave out changes no answer: cuts, stages, replicas, states and versions."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from extents import first_few, slow_but_for
from instances import ALL_SCHEDULES, crowded_instance, drawn, mixed_instance, unequal_instance
from long_chains import chain
from solver_contract import check_dp, solve_by_dp

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.plan import schedules
from pipeplan.problem.cuts import Floats, Ints, enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.solvers.dp import cut_selection, find_pipeline, pipeline_searches
from pipeplan.solvers.dp.budget import SearchLimits, limits_of
from pipeplan.solvers.dp.search.cost_terms import AnyInputStage, CostTerms
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.placement_search import PlacementSearch, SharedLimit
from pipeplan.solvers.dp.search.shared_resources import SharedResources
from pipeplan.solvers.dp.search.stage_terms import StageTerms
from pipeplan.solvers.dp.search.states import undominated_rows
from pipeplan.solvers.dp.search.uniform_search import UniformSearch
from pipeplan.solvers.plan_space import plan_spaces

# Cuts.


@pytest.mark.parametrize("seeds", first_few(range(400), 3))
@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_plans_on_few_cuts_first_change_no_answer(schedule: str, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_selection, "SELECTED_CUTS", 1)
    if schedule not in schedules.FLUSHING:
        monkeypatch.setattr(cut_selection, "_PART", 0.75)
        monkeypatch.setattr(pipeline_searches, "_REFINED_CUTS", 0)
    for seed in seeds:
        check_dp(*drawn(seed, lambda n: replace(mixed_instance(n, layers=5, schedule=schedule), recompute=n % 3 > 0)))


SHAPES = ((24,), (4, 6), (8, 3), (2, 3, 4), (3, 2, 2, 2))


def _long_problem(seed: int) -> Problem:
    """A chain of 8 to 16 layers on 24 workers, too long for brute force, with memory for a part of it."""
    rng = random.Random(seed)
    layers = [
        Layer(f"l{i}", rng.uniform(1, 9), rng.uniform(1, 20), rng.randint(0, 80), rng.randint(0, 60))
        for i in range(rng.randint(8, 16))
    ]
    sizes = [rng.randint(1, 20) for _ in layers[1:]]
    whole = sum(layer.parameter_bytes * 4 + layer.saved_bytes for layer in layers)
    levels = tuple(
        Level(f"n{i}", n, rng.choice([5.0, 20.0, 100.0]), rng.choice([0.0, 0.3]))
        for i, n in enumerate(rng.choice(SHAPES))
    )
    cluster = Cluster("c", Device("d", "cuda", int(whole * rng.uniform(0.3, 1.2))), levels)
    profile = chain(layers, sizes, optimizer_state_ratio=1.0)
    return Problem(profile, cluster, Options(overlap=rng.choice([1.0, 1.0, 0.5]), contention=False))


@pytest.mark.parametrize("seed", slow_but_for(range(4), range(12)))
def test_the_search_over_undominated_states_answers_as_the_one_that_tries_all_runs(seed: int) -> None:
    problem = _long_problem(seed)
    cuts = enumerate_cuts(problem, 1000)
    one, other = CostTerms(problem, cuts), HeterogeneousTerms(problem, cuts)
    limits = SearchLimits(memory=True, recompute=seed % 2 == 0)
    rng, answers = random.Random(seed), set()
    for _ in range(8):
        threshold = one.floor * rng.uniform(1.0, 8.0) ** rng.choice([0.5, 1, 2])
        found = UniformSearch(one, threshold, limits).run() is not None
        assert found == (PlacementSearch(other, threshold, limits).run() is not None), threshold
        answers.add(found)
    free = CostTerms(replace(problem, options=replace(problem.options, memory=False)), cuts)
    unlimited = UniformSearch(free, one.floor * 64, SearchLimits(memory=False)).run()
    assert True not in answers or unlimited is not None


# Stages and replicas.


class _Thorough(PlacementSearch):
    """The search that sizes every stage on every placement."""

    def _windows(self, stage: StageTerms, behind: Floats, runs: Ints, transfer: Floats) -> tuple[Ints, Ints, Ints]:
        count = len(stage.begin)
        return np.arange(count), np.zeros(len(runs), dtype=np.intp), np.full(len(runs), count)


class _Unaware(PlacementSearch):
    """The search that counts the minibatches of an update only where they are in flight."""

    def _most_demand(self) -> Floats:
        return np.full(self.last + 1, np.inf)


def _search(kind: type[PlacementSearch], problem: Problem, step_time_s: float, *, memory: bool) -> PlacementSearch:
    """A search for a plan within a step time, once it has run."""
    resources = SharedResources.of(problem, plan_spaces(problem)[0], enumerate_cuts(problem, 1000), memory=memory)
    assert isinstance(resources.terms, HeterogeneousTerms)
    limits = limits_of(resources.problem, memory=memory, deadline=None)
    search = kind(resources.terms, step_time_s, limits, SharedLimit(resources, step_time_s))
    search.run()
    return search


@pytest.mark.parametrize("schedule", ["1f1b-stashing", "2bw"])
def test_stages_that_are_not_sized_and_states_without_minibatches_lead_to_no_plan(schedule: str) -> None:
    found = fewer = 0
    for seed in range(24):
        draw = (mixed_instance, unequal_instance, crowded_instance)[seed % 3]
        _, problem = drawn(seed, lambda n: replace(draw(n, layers=6, schedule=schedule), contention=True))  # noqa: B023
        best = solve_by_dp(problem)
        factors = (0.95, 1.0, 1.5) if best.plan is not None else ()
        for factor, memory in itertools.product(factors, (False, True)):
            step_time_s = best.objective_s * factor
            quick = _search(PlacementSearch, problem, step_time_s, memory=memory)
            thorough = _search(_Thorough, problem, step_time_s, memory=memory)
            assert quick.kept.keys() == thorough.kept.keys(), seed
            for cut, states in quick.kept.items():
                assert np.array_equal(states.numbers, thorough.kept[cut].numbers), (seed, cut)
                assert np.array_equal(states.demand, thorough.kept[cut].demand), (seed, cut)
                found += len(states)
            if memory and schedule == "2bw":
                unaware = _search(_Unaware, problem, step_time_s, memory=True)
                assert (0 in quick.kept) == (0 in unaware.kept), (seed, factor)
                counts = [sum(map(len, search.kept.values())) for search in (quick, unaware)]
                assert counts[0] <= counts[1], (seed, factor)
                fewer += counts[0] < counts[1]
    assert found > 500
    assert fewer > 2 or schedule != "2bw"


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


# States.


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


# Versions under vertical sync.


def test_any_input_stage_asks_for_no_more_versions_than_a_real_one() -> None:
    for copies, depth, first in itertools.product((1, 2, 3), range(1, 8), range(1, 7)):
        bound, delay = AnyInputStage.of(copies, depth, first), depth + int(schedules.update_lag(first * copies, False))
        for replicas in range(1, 7):
            least = schedules.vertical_versions(bound.delay, bound.replicas, replicas)
            assert least <= schedules.vertical_versions(delay, first, replicas), (copies, depth, first, replicas)
        assert bound.delay_with(first, copies) == delay, "as much as this stage asks for"
        assert AnyInputStage(1, bound.delay - 1).delay_with(first, copies) <= delay


def test_the_search_with_any_input_stage_is_used_where_memory_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    searched, inner = [], find_pipeline._with_any_input_stage

    def counted(*arguments: object) -> object:
        searched.append(arguments)
        return inner(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(find_pipeline, "_with_any_input_stage", counted)
    for seed in range(700, 706):
        check_dp(*drawn(seed, lambda one: mixed_instance(one, layers=5, schedule="vertical-sync")))
    assert searched
