"""DP, ILP, evaluator and checker against brute force, which shares no code with them, on random problems."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import brute_force
import pytest
from brute_force import Cards
from brute_formulas import Costs
from brute_machines import Machine
from checking import fault, findings, solved, written
from extents import first_few
from instances import (
    ALL_SCHEDULES,
    Instance,
    burdened,
    corrected_instance,
    crowded_instance,
    divided_instance,
    drawn,
    hasty_instance,
    mixed_instance,
    random_instance,
    roomy,
    tied_instance,
    to_plan,
    to_problem,
    unequal_instance,
)
from solver_contract import assert_proves, check_dp, check_ilp, solve_by_dp, solve_by_ilp

from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.search import placement_search, states
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.solvers.result import Status

Draw = Callable[[int, int], Instance]
"""The problem of a seed, of at most so many layers."""
ANY: tuple[Callable[..., Instance], ...] = (random_instance, mixed_instance, unequal_instance, crowded_instance)
FREE: dict[str, Any] = {"max_workers": None, "max_stages": None, "stages": None, "pins": ()}
WIDE = [(2, 4), (4, 2), (2, 3), (3, 2), (2, 2, 2), (1, 6), (2, 3, 1)]
"""Uniform clusters on which a stage can reach beyond both ends of a server."""


class Kind(NamedTuple):
    """A kind of random problems, and the seeds of those that the default suite tries."""

    draw: Draw
    dp: range = range(0)
    ilp: range = range(0)
    layers: int = 5
    """For the DP; the ILP has one less."""
    without: Callable[[Instance], Instance] | None = None
    """The problem without what the kind is about."""
    share: float = 0.0
    """Of the problems, whose best plan is slower by what the kind is about."""


def _of(draw: Callable[..., Instance], schedule: str | None, **changes: Any) -> Draw:
    return lambda seed, layers: replace(draw(seed, layers=layers, schedule=schedule), **changes)


def _any(seed: int, layers: int) -> Instance:
    """Uniform clusters and servers that differ, all schedules, more and less traffic."""
    draw = ANY[seed % 4]
    return draw(seed, layers=layers, **({} if draw is random_instance else {"schedule": ALL_SCHEDULES[seed // 4 % 5]}))


def _burdened(seed: int, layers: int) -> Instance:
    """The executor's own work; in part uniform grids, in part with what workers share charged."""
    found = burdened(_any(seed, layers), seed)
    return replace(found, contention=seed // 20 % 2 == 0, grid=seed // 40 % 4 == 3)


def _roomy(seed: int, layers: int) -> Instance:
    """Workspaces of layers, in part with the executor's memory, shared weights or divided state."""
    special = (corrected_instance, divided_instance, tied_instance)[seed // 8 % 3]
    found = special(seed, layers=layers) if seed % 8 == 7 else _any(seed, layers)
    found = roomy(burdened(found, seed) if seed % 3 == 0 else found, seed)
    return replace(found, grid=seed // 40 % 4 == 3)


def _wide(seed: int, layers: int) -> Instance:
    """6 to 8 workers of equal servers, whose cards are slower than the ports inside."""
    rng = random.Random(f"wide {seed}")
    found = mixed_instance(seed, layers=layers, schedule=rng.choice(["1f1b-stashing", *ALL_SCHEDULES]))
    rates = sorted((rng.choice([4.0, 8.0, 20.0, 60.0]) for _ in range(3)), reverse=True)
    levels = [(count, rate, 0.0) for count, rate in zip(rng.choice(WIDE), rates, strict=False)]
    return replace(found, **FREE, levels=levels, contention=True, cores=seed % 3)


def _racks(seed: int, layers: int) -> Instance:
    """Equal racks of two servers that differ, so that copies may keep to the servers with the faster cards."""
    rng = random.Random(f"racks {seed}")
    found = mixed_instance(seed, layers=layers, schedule=ALL_SCHEDULES[seed % 5])
    rack = [Machine(1, rng.choice([1.0, 1.0, 2.0]), 1.0, (100.0, 0.0), rng.choice([0.0, 1.0, 5.0])) for _ in range(2)]
    count = rng.choice([2, 3])
    levels = [(0, 0.0, 0.0), (2, 20.0, 0.0), (count, rng.choice([4.0, 50.0]), 0.0)]
    free = {"stages": None, "max_workers": None, "contention": seed % 2 == 0}
    return replace(found, levels=levels, servers=tuple(rack) * count, **free)


def _waiting(seed: int, layers: int) -> Instance:
    """Gradients take about as long as computing, so that plain data parallelism waits for its updates."""
    rng, mib = random.Random(seed), 2.0**20
    made = [
        {"f": rng.random(), "b": 2 * rng.random(), "w": rng.randint(1, 60) * mib, "s": 0.0, "u": 0.0}
        for _ in range(layers)
    ]
    tensors, rate = [(index, (index + 1,), 1000.0, 1000.0) for index in range(layers - 1)], rng.choice([40.0, 80.0])
    found = Instance(made, tensors, [(4, rate * mib, 0.0)], contention=True, overlap=rng.choice([1.0, 1.0, 0.0]))
    servers = tuple(Machine(2, speed, 1.0, (rate * mib, 0.0)) for speed in (1.0, 1.5))
    return replace(found, levels=[(0, 0.0, 0.0), (2, 80 * mib, 0.0)], servers=servers) if seed % 2 else found


def _unburdened(instance: Instance) -> Instance:
    return replace(instance, executor=(0.0,) * 4, sample=0.0, step=0.0, worker=0.0, share=0.0, kept=0.0)


def _without_workspaces(instance: Instance) -> Instance:
    return replace(instance, layers=[layer | {"x": 0.0} for layer in instance.layers])


def _charged(draw: Draw) -> Draw:
    """With what workers share charged; those of two thirds share their server's cores."""
    return lambda seed, layers: replace(draw(seed, layers), contention=True, cores=seed % 3)


KINDS = {
    "random": Kind(lambda seed, layers: random_instance(seed, layers=layers), range(4), range(4), 6),
    "corrected": Kind(_of(corrected_instance, None), range(2), range(100, 101)),
    "divided": Kind(_of(divided_instance, None), range(2), range(100, 101)),
    "tied": Kind(_of(tied_instance, None), range(6), range(2), 5, lambda one: replace(one, tied=()), 0.2),
    "tied grids": Kind(_of(tied_instance, None, grid=True, allow_copies=False), range(1000, 1004), layers=4),
    "versions in memory": Kind(_of(mixed_instance, "vertical-sync"), range(700, 712), range(5)),
    "everything charged": Kind(
        lambda seed, layers: replace(_any(seed, layers), contention=True),
        range(16),
        without=lambda one: replace(one, contention=False),
        share=0.05,
    ),
    "executor's work": Kind(_burdened, range(12), range(8), 5, _unburdened, 0.3),
    "workspaces": Kind(_roomy, range(40), range(18), 5, _without_workspaces, 0.12),
    "waiting updates": Kind(
        _waiting, range(12), layers=4, without=lambda one: replace(one, contention=False), share=0.3
    ),
    "wide clusters": Kind(_wide, ilp=range(3), layers=4),
    "racks": Kind(_racks, range(12), layers=4),
}
for schedule in (None, *ALL_SCHEDULES):
    for draw in (mixed_instance, unequal_instance):
        KINDS[f"{draw.__name__} {schedule}"] = Kind(_of(draw, schedule), range(2), range(100, 101))
        KINDS[f"grids of {draw.__name__} {schedule}"] = Kind(_of(draw, schedule, grid=True), range(1), range(1))
    for draw in (mixed_instance, unequal_instance, crowded_instance):
        KINDS[f"charged {draw.__name__} {schedule}"] = Kind(_charged(_of(draw, schedule)), ilp=range(2, 3))
for schedule in ("gpipe", "1f1b-flush", "zb-h1", "vertical-sync"):
    KINDS[f"parallel links {schedule}"] = Kind(_of(mixed_instance, schedule, boundary="parallel"), range(1), layers=4)
    for boundary in ("single", "parallel"):
        differing = _of(unequal_instance, schedule, boundary=boundary)
        KINDS[f"unequal, {boundary} links {schedule}"] = Kind(differing, range(1), layers=4)
    if schedule != "vertical-sync":
        KINDS[f"hasty {schedule}"] = Kind(_of(hasty_instance, schedule), range(4, 6), range(4, 6))


def _seeds(solver: str, slow: range) -> list[Any]:
    """Each kind with its few seeds, and with many, which are slow."""
    few = {name: getattr(kind, solver) for name, kind in KINDS.items() if getattr(kind, solver)}
    later = [pytest.param(name, slow, marks=pytest.mark.slow, id=f"{name}, {len(slow)}") for name in few]
    return [*(pytest.param(name, seeds, id=name) for name, seeds in few.items()), *later]


def _matters(kind: Kind, instance: Instance, expected_s: float) -> bool:
    return kind.without is not None and brute_force.best(kind.without(instance)) < expected_s * (1 - 1e-9)


@pytest.mark.parametrize(("name", "seeds"), _seeds("dp", range(10_000, 10_200)))
def test_the_dp_proves_the_best_of_all_plans(name: str, seeds: range) -> None:
    kind, slower = KINDS[name], 0
    for seed in seeds:
        instance, problem = drawn(seed, lambda number: kind.draw(number, kind.layers))
        slower += _matters(kind, instance, check_dp(instance, problem))
    assert slower >= kind.share * len(seeds), "chosen so that what the kind is about often matters"


@pytest.mark.parametrize(("name", "seeds"), _seeds("ilp", range(30_000, 30_050)))
def test_the_ilp_proves_the_best_of_all_plans(name: str, seeds: range) -> None:
    kind = KINDS[name]
    for seed in seeds:
        made = drawn(seed, lambda number: kind.draw(number, kind.layers - 1))
        check_ilp(*made, ("cold", "bounded") if seed % 5 == 0 else ["bounded"])


@pytest.mark.parametrize("seeds", first_few(range(30), 2))
def test_the_evaluator_scores_the_oracles_plan_alike(seeds: range) -> None:
    names = [name for name, kind in KINDS.items() if kind.dp.stop == 2 or name == "tied"]
    assert len(names) > 14
    for seed, name in itertools.product(seeds, names):
        instance, problem = drawn(seed, lambda number: KINDS[name].draw(number, 6))  # noqa: B023
        best = brute_force.best_plan(instance)
        if best.stages:
            score = evaluate(to_plan(instance, best), problem)
            assert score.fits, (name, seed)
            assert score.step_time_s == pytest.approx(best.step_time, rel=1e-8), (name, seed)


@pytest.mark.parametrize("seeds", first_few(range(20), 8))
@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_the_evaluator_charges_cards_as_the_oracle_does(schedule: str, seeds: range) -> None:
    bound = 0
    for seed in seeds:
        instance, problem = drawn(seed, lambda number: crowded_instance(number, layers=6, schedule=schedule))
        best = brute_force.best_plan(replace(instance, contention=False))
        if best.stages:
            busiest = Cards(Costs(instance, best.copies), best.size).busiest(best.stages)
            plan = to_plan(instance, best)
            loads = contention.card_loads(plan, problem, Links.of(problem.cluster))
            assert loads.busiest()[0] == pytest.approx(busiest, rel=1e-8), seed
            assert evaluate(plan, problem).step_time_s == pytest.approx(max(best.step_time, busiest), rel=1e-8), seed
            bound += busiest > best.step_time / 4
    assert bound > len(seeds) / 5


@pytest.mark.parametrize("seeds", first_few(range(44), 6))
@pytest.mark.parametrize("name", ["executor's work", "workspaces"])
def test_the_checker_computes_the_same_and_its_proof_holds(name: str, seeds: range) -> None:
    proven = 0
    for seed in seeds:
        _, drawn_problem = drawn(seed, lambda number: KINDS[name].draw(number, 5))
        for problem, outcome in solved([drawn_problem]):
            document = written(outcome)
            assert fault(document, problem.profile) == "", seed
            proven += findings(document, problem.profile)["optimality"].holds is True
            executor_s = [node.get("executor_s", 0.0) for node in document["prediction"]["stages"]]
            assert any(executor_s) == any(problem.cluster.executor.times().values()) or not math.fsum(executor_s), seed
            if any(executor_s):  # what hides the executor's work is refused
                document["prediction"]["stages"][executor_s.index(max(executor_s))]["executor_s"] *= 0.5
                refused = [one.text for one in findings(document, problem.profile).values() if one.holds is False]
                assert any("executor_s" in text for text in refused), seed
    assert proven > len(seeds) / 4


def test_a_worker_that_needs_all_memory_is_refused() -> None:
    _, problem = drawn(0, lambda number: _burdened(number, 5))
    device = replace(problem.cluster.device, memory_bytes=1000)
    cluster = replace(problem.cluster, device=device, executor=ExecutorCosts(worker_bytes=1000))
    with pytest.raises(InputError, match="before any layer"):
        Problem(problem.profile, cluster, replace(problem.options, memory=True))


@pytest.mark.parametrize("seeds", first_few(range(400), 12))
def test_a_search_ends_where_only_slower_plans_are_left(seeds: range) -> None:
    """The step time from which plans are of no use is an argument of the DP."""
    early = 0
    for seed in seeds:
        _, problem = drawn(seed, lambda number: KINDS["everything charged"].draw(number, 5))
        cuts = enumerate_cuts(problem, 1000)
        whole = dynamic_program.solve(problem, cuts)
        if whole.plan is None:
            continue
        best_s = whole.objective_s
        barely = dynamic_program.solve(problem, cuts, useful_s=best_s * (1 + 1e-6))
        assert barely.objective_s == pytest.approx(best_s, rel=1e-9), seed
        assert barely.bound_s == pytest.approx(best_s, rel=1e-9), seed
        nothing = dynamic_program.solve(problem, cuts, useful_s=best_s * 0.95)
        assert nothing.objective_s >= best_s * (1 - 1e-9), seed
        assert best_s * 0.95 <= nothing.bound_s * (1 + 1e-9) <= best_s * (1 + 2e-9), seed
        early += nothing.bound_s < best_s * (1 - 1e-6)
    assert early > len(seeds) / 20


@pytest.mark.parametrize("schedule", ["1f1b-stashing", "2bw", "vertical-sync"])
def test_asynchronous_schedules_keep_shared_weights_in_one_stage(schedule: str) -> None:
    for seed in range(4):
        instance, problem = drawn(seed, lambda one: tied_instance(one, layers=4, schedule=schedule))
        assert not problem.shared
        check_dp(instance, problem)


def test_copies_avoid_slow_cards_and_small_pieces_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    spared = sum(any(one.unused for one in plan_spaces(drawn(seed, lambda n: _racks(n, 4))[1])) for seed in range(12))
    assert spared > 1, "copies keep to servers with fast cards"
    monkeypatch.setattr(placement_search, "AT_ONCE", 5)
    monkeypatch.setattr(states, "_KEPT_PIECE", 3)
    for seed in (300, 301):
        check_dp(*drawn(seed, lambda one: unequal_instance(one, schedule=ALL_SCHEDULES[seed % 5])))  # noqa: B023


# Single problems, each of which was solved wrongly once.


def test_copies_of_a_pipeline_divide_the_optimisers_state_too() -> None:
    """Three straight copies, none of which would hold the whole state of its layers."""
    check_dp(*drawn(8038, lambda number: divided_instance(number, layers=5)))


def test_an_infeasible_verdict_of_presolve_is_checked() -> None:
    # HiGHS 1.15 with presolve calls this program infeasible below the cut-off, and finds a plan without.
    check_ilp(*drawn(20611, lambda number: random_instance(number, layers=5)), ["bounded"])


def test_a_program_that_highs_fails_on_with_presolve_is_solved_without() -> None:
    # HiGHS 1.16 with presolve ends with a "Solve error" in the first space of plans.
    check_ilp(*drawn(1100, lambda number: mixed_instance(number, layers=5, schedule="gpipe")), ["cold"])


def test_a_solution_that_is_worse_than_the_optimum_stated_with_it_is_not_believed() -> None:
    # HiGHS 1.15 with presolve calls the slower of two plans of this problem optimal, beside the faster one's objective.
    check_ilp(*drawn(612, random_instance), ["cold"])


def test_parallel_links_are_those_of_the_boundary_not_of_the_workers_before_it() -> None:
    # 2-2 over parallel links: the cut behind the first of two replicas is the boundary behind both.
    instance, problem = drawn(14, lambda number: mixed_instance(number, layers=5, schedule="gpipe"))
    assert instance.boundary == "parallel"
    check_ilp(instance, problem, ["cold"])


@pytest.mark.parametrize(("schedule", "seed"), [("vertical-sync", 137), ("1f1b-flush", 119)])
def test_a_stage_covers_the_minibatches_in_flight_behind_it(schedule: str, seed: int) -> None:
    """The fastest stages do not fit in memory with the depths that the stages behind them ask for."""

    def free(number: int) -> Instance:
        return replace(crowded_instance(number, layers=5, schedule=schedule), contention=False)

    check_ilp(*drawn(seed, free), ["cold", "bounded"])


def test_a_step_time_within_the_rounding_of_depths_ends_the_search() -> None:
    # Three stages of one worker have 5 minibatches in flight, or 4 where 2 x / T of the first boundary is less than
    # 1e-9, which 2bw needs here: the optimum lies where the slack of the rounding begins.
    tensors = [(0, (1,), 8.0, 8.0), (1, (2,), 4096.0, 4.0)]
    sizes = ((1.0, 100.0), (0.5, 0.0), (0.25, 4e6))
    layers = [{"f": time, "b": 2 * time, "w": weights, "s": 10.0, "u": 0.0} for time, weights in sizes]
    instance = Instance(layers, tensors, [(4, 5e9, 0.0)], stages=3, max_replicas=1, schedule="2bw", accumulate=4)
    problem = to_problem(replace(instance, overlap=0.0))
    result = solve_by_dp(problem)
    assert result.status == Status.OPTIMAL
    assert evaluate(result.plan, problem).alone_s == pytest.approx(result.objective_s, rel=1e-8)


# What the ILP is given.


def test_cbc_agrees_with_brute_force_too() -> None:
    for seed in range(300, 303):
        instance, problem = drawn(seed, lambda number: random_instance(number, layers=5))
        found = integer_program.solve(problem, integer_program.IlpLimits(solver="cbc"))
        assert_proves(found, brute_force.best(instance), problem)


def test_a_cutoff_that_is_too_low_is_noticed_and_one_that_is_too_high_is_beaten() -> None:
    _, problem = drawn(1, lambda number: random_instance(number, layers=5))
    best = solve_by_dp(problem)
    assert solve_by_ilp(problem, best.objective_s * 0.9).status == Status.INFEASIBLE
    assert solve_by_ilp(problem, best.objective_s * 3).objective_s == pytest.approx(best.objective_s, rel=1e-6)


def test_a_graph_with_too_many_cuts_is_still_proven_by_the_ilp() -> None:
    for seed in range(500, 504):
        instance, problem = drawn(seed, lambda number: random_instance(number, layers=5))
        expected = brute_force.best(instance)
        if not math.isinf(expected):
            outcome = solve(problem, Settings(maximum_cuts=1, simulate=False))
            assert outcome.evaluation.alone_s == pytest.approx(expected, rel=1e-6)
