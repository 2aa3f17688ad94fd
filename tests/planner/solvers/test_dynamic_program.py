"""What the dynamic program knows before it ends, and that what it leaves out changes no answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from extents import first_few, slow_but_for
from instances import ALL_SCHEDULES, drawn, mixed_instance, unequal_instance
from long_chains import chain, long_chain
from solver_contract import check_dp, solve_by_dp

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan import schedules
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.solvers.dp import cut_selection, dynamic_program, find_pipeline, pipeline_searches, spaces
from pipeplan.solvers.dp.budget import OutOfTime, SearchEffort, SearchLimits, Step
from pipeplan.solvers.dp.dynamic_program import first_plan
from pipeplan.solvers.dp.pipeline_searches import PipelineSearches
from pipeplan.solvers.dp.results import least_step_time_s
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.flush_search import FlushSearch, PlacementFlushSearch
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.placement_search import PlacementSearch
from pipeplan.solvers.dp.search.uniform_search import UniformSearch
from pipeplan.solvers.dp.spaces import BatchSpaces
from pipeplan.solvers.dp.threshold import BisectionResult
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.solvers.result import Status

INF = float("inf")


def _large(schedule: str, *, charged: bool) -> Problem:
    levels = (Level("server", 2, 1e10, 1e-6), Level("cluster", 8, 1e9, 1e-5))
    cluster = Cluster("lab", Device("chip", "cuda", 500 << 20), levels)
    accumulate = 32 if schedule in ACCUMULATING else None
    options = Options(schedule=schedule, accumulate=accumulate, contention=charged, allow_copies=charged)
    return Problem(long_chain(320), cluster, options)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_a_large_problem_has_a_plan_at_once_and_what_is_reported_never_gets_worse(schedule: str) -> None:
    problem = _large(schedule, charged=ALL_SCHEDULES.index(schedule) % 2 == 0)
    told: list[tuple[float, float]] = []
    result = dynamic_program.solve(
        problem,
        enumerate_cuts(problem, 10_000),
        report=lambda *state: told.append(state),
        effort=SearchEffort(300_000),
        price=lambda plan: evaluate(plan, problem).step_time_s,
    )
    assert told[0] == (least_step_time_s(problem), INF)
    assert told[1][1] < INF, "the first plan is the second thing that is known"
    bounds, step_times = [bound for bound, _ in told], [step_time for _, step_time in told]
    assert bounds == sorted(bounds)
    assert step_times == sorted(step_times, reverse=True)
    assert result.plan is not None
    assert bounds[-1] <= result.objective_s * (1 + 1e-9)
    assert step_times[-1] >= result.objective_s * (1 - 1e-9), "the best step time that was told is that of a plan"


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_the_first_plan_is_the_answer_where_nothing_else_is_found(schedule: str) -> None:
    problem = _large(schedule, charged=False)
    cuts = enumerate_cuts(problem, 10_000)
    first = first_plan(problem, cuts, None)
    score = evaluate(first.plan, problem)
    assert score.fits
    assert score.step_time_s == pytest.approx(first.objective_s)
    stopped = dynamic_program.solve(problem, cuts, None, effort=SearchEffort(0))
    assert (stopped.status, stopped.plan) == (Status.FEASIBLE, first.plan)
    assert 0 < stopped.bound_s <= stopped.objective_s == first.objective_s


def _stop_after(searches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the searches run out of time after so many of them."""
    done = itertools.count()
    for kind in (FlushSearch, PlacementFlushSearch):

        def run(self: FlushSearch, whole: Callable[[FlushSearch], list[Step] | None] = kind.run) -> list[Step] | None:
            if next(done) >= searches:
                raise OutOfTime
            return whole(self)

        monkeypatch.setattr(kind, "run", run)


@pytest.mark.parametrize("seeds", first_few(range(8), 2))
@pytest.mark.parametrize("searches", [0, 10, 40])
def test_a_search_that_is_stopped_returns_only_plans_that_fit(
    searches: int, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit on memory the search finds plans that do not fit; its bound holds all the same."""
    found, draws = 0, (mixed_instance, unequal_instance)
    schedules = ("gpipe", "1f1b-flush", "zb-h1")
    for seed, schedule, draw, boundary in itertools.product(seeds, schedules, draws, ("single", "parallel")):
        _, problem = drawn(seed, lambda one: replace(draw(one, layers=4, schedule=schedule), boundary=boundary))  # noqa: B023
        best = solve_by_dp(problem)
        with monkeypatch.context() as patch:
            _stop_after(searches, patch)
            result = solve_by_dp(problem)
        if result.status == Status.INFEASIBLE:
            assert best.status == Status.INFEASIBLE
            continue
        assert result.bound_s <= best.objective_s * (1 + 1e-9)
        if result.plan is not None:
            found += 1
            score = evaluate(result.plan, problem)
            assert score.fits
            assert score.alone_s == pytest.approx(result.objective_s, rel=1e-6)
            assert result.objective_s >= best.objective_s * (1 - 1e-9)
    assert found > 0 if searches == 40 else found == 0 or searches


# Where few plans fit, or few can be searched.


def _tight() -> Problem:
    """Sixty layers, of which no two fit on one worker with all minibatches of an early stage in flight."""
    layers = [Layer(f"l{index}", 1.0, 2.0, 10, 10) for index in range(60)]
    cluster = Cluster("tight", Device("d", "cuda", 450), (Level("server", 8, 100.0), Level("cluster", 4, 10.0)))
    options = Options(schedule="1f1b-flush", accumulate=64, recompute=False, allow_copies=False)
    return Problem(chain(layers, 1), cluster, options)


def test_where_few_plans_fit_a_search_that_ends_early_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_early(_: BatchSpaces, low: float, *, memory: bool) -> BisectionResult[object]:
        return BisectionResult(low, finished=False)

    problem = _tight()
    with monkeypatch.context() as patch:
        patch.setattr(BatchSpaces, "_refined", ends_early)
        found = dynamic_program.solve(problem, enumerate_cuts(problem, 1000), seconds=60.0)
    assert found.status == Status.FEASIBLE
    assert len(found.plan.stages) > 8
    assert evaluate(found.plan, problem).fits
    searches, find = [], BatchSpaces._find

    def counted(spaces: BatchSpaces, step_time_s: float, *, memory: bool, coarse: bool) -> object:
        searches.append(step_time_s)
        return find(spaces, step_time_s, memory=memory, coarse=coarse)

    monkeypatch.setattr(BatchSpaces, "_find", counted)
    alone = replace(problem, options=replace(problem.options, stages=1))
    assert solve_by_dp(alone).status == Status.INFEASIBLE
    assert 0 < len(searches) <= 4, "few searches say that no plan of one stage fits"


@pytest.mark.parametrize("schedule", ["1f1b-stashing", "1f1b-flush"])
def test_spaces_for_which_there_is_no_time_are_left_out_with_their_bounds(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of servers have as many spaces of plans."""
    profile = chain([Layer("a", 1.0, 2.0, 100, 10), Layer("b", 0.5, 1.0, 10, 4)], 8, 8)
    levels = (Level("server", 2, 1e9), Level("cluster", 3000, 1e8, 1e-5, 0.6))
    options = Options(stages=2, schedule=schedule, accumulate=8 if schedule == "1f1b-flush" else None)
    problem = Problem(profile, Cluster("many", Device("V100", "cuda", 1 << 30), levels), options)
    searched, best = [], PipelineSearches.best

    def counted(self: PipelineSearches) -> Any:
        searched.append(self)
        return best(self)

    monkeypatch.setattr(PipelineSearches, "best", counted)
    found = dynamic_program.solve(problem, enumerate_cuts(problem, 100), 0.0)
    assert len(searched) <= spaces.MOST_UNTIMED
    assert found.bound_s <= min(space.floor(problem) for space in plan_spaces(problem))


def test_servers_that_differ_may_be_as_many_as_can_be_searched() -> None:
    _, problem = drawn(2, unequal_instance)
    late = dynamic_program.solve(problem, enumerate_cuts(problem, 10_000), seconds=0.0)
    assert (late.status, late.plan) == (Status.TIME_LIMIT, None)
    servers = [
        Server(Device("d", "cpu", 10**9), Level("server", size, 1e9)) for size in (find_pipeline.MOST_WORKERS, 1)
    ]
    large = problem.within(Cluster.of_servers("large", servers, [Level("cluster", 2, 1e9)]))
    with pytest.raises(InputError, match=r"large has 1025 workers; with servers that differ .* at most 1024"):
        solve_by_dp(large)


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
