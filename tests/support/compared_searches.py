"""Runs searches with array code and with the loops that numba compiles, and compares all that they find.

    python tests/support/compared_searches.py FIRST END graphs

goes over random problems by seed and prints how many states it compared. `chains` are long ones whose memory binds,
`flush` and `vertical` small ones of these schedules, and `answers` are compared with brute force. With
NUMBA_DISABLE_JIT=1 in the environment the loops run as they are written. It is run by
`tests/planner/solvers/dp/compiled/test_compiled_loops.py`, in processes of their own, because a process that has loaded
the loops uses them from then on.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import brute_force
import numpy as np
from brute_machines import Instance
from instances import divided_instance, drawn, mixed_instance, random_instance, roomy, to_problem
from long_chains import long_chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.grid_shapes import grid_shapes
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.budget import SearchEffort, SearchLimits, StateCounts
from pipeplan.solvers.dp.flush.uniform_flush import FlushSearch
from pipeplan.solvers.dp.steady import uniform_search
from pipeplan.solvers.dp.steady.uniform_search import UniformSearch
from pipeplan.solvers.dp.steady.vertical_sync import VerticalSearch
from pipeplan.solvers.dp.terms.batch_limit import BatchLimit
from pipeplan.solvers.dp.terms.cost_terms import CostTerms, InputStage
from pipeplan.solvers.dp.terms.input_stages import AnyInputStage
from pipeplan.solvers.plan_space import plan_spaces

COUNTS = (
    StateCounts(),
    StateCounts(stages=True),
    StateCounts(exact_stages=True),
    StateCounts(workers=True),
    StateCounts(stages=True, workers=True),
)


def use_loops(begin: float) -> None:
    """Have searches go on with loops as soon as array code has done so much work; infinite for never."""
    uniform_search.are_loops_due = lambda work, loops: work >= begin  # type: ignore[assignment]


def assert_equal(
    problem: Problem,
    threshold: float,
    limits: SearchLimits,
    kind: Callable[..., UniformSearch] = UniformSearch,
    first: InputStage | None = None,
) -> int:
    """Search with array code and with loops. Returns the number of states.

    `first` is the input stage that is assumed under vertical sync.
    """
    found = []
    for begin in (math.inf, 0.0):
        use_loops(begin)
        terms = CostTerms(problem, enumerate_cuts(problem, 1000), first)
        search = kind(terms, threshold, replace(limits, effort=SearchEffort()))
        found.append((search.run(), search))
    steps, arrays = found[0]
    for other_steps, loops in found[1:]:
        assert other_steps == steps
        assert loops.kept.keys() == arrays.kept.keys()
        for cut, states in arrays.kept.items():
            assert np.array_equal(loops.kept[cut].numbers, states.numbers), cut
            assert np.array_equal(loops.kept[cut].demand, states.demand), cut
            assert (states.times is None) == (loops.kept[cut].times is None)
            assert states.times is None or np.array_equal(loops.kept[cut].times, states.times), cut  # type: ignore[arg-type]
    return sum(len(states) for states in arrays.kept.values())


def drawn_problem(seed: int) -> Problem:
    """A small problem for the search on equal servers, of a schedule without a flush."""
    if seed % 3 == 0:
        _, problem = drawn(seed, lambda one: _at_times_roomy(random_instance(one), seed))
    else:
        schedule = ("1f1b-stashing", "2bw")[seed % 2]
        _, problem = drawn(seed, lambda one: _at_times_roomy(mixed_instance(one, layers=7, schedule=schedule), seed))
    options = problem.options
    if options.flushes or options.schedule == "vertical-sync":
        options = replace(options, schedule="1f1b-stashing", accumulate=None)
    return replace(problem, options=replace(options, boundary="single", pins=()))


def _at_times_roomy(instance: Instance, seed: int) -> Instance:
    """The problem, for every other seed with layers that need memory while they run."""
    return roomy(instance, seed) if seed // 3 % 2 else instance


def compare(seed: int) -> int:
    """Compare searches for a random problem, of several kinds and thresholds. Returns the number of states."""
    problem, rng, states = drawn_problem(seed), random.Random(seed), 0
    if not problem.cluster.uniform:
        return 0
    inner = rng.choice(plan_spaces(problem)).inner(problem)
    terms = CostTerms(inner, enumerate_cuts(inner, 1000))
    for _ in range(3):
        one = inner if rng.random() < 0.7 else inner.without_memory_limit()
        counting = rng.choice(COUNTS)
        shape = rng.choice([*grid_shapes(inner), None]) if counting.exact_stages else None
        limits = SearchLimits(
            memory=(memory := one.options.memory),
            recompute=memory and one.training and rng.random() < 0.5,
            counting=counting,
            exact_stages=shape.stages if shape else rng.randint(1, 4) if counting.exact_stages else None,
            max_stages=rng.randint(1, 4) if counting.stages else None,
            max_workers=rng.randint(1, inner.cluster.workers) if counting.workers else None,
            every_cut=rng.random() < 0.3,
            shape=shape,
        )
        states += assert_equal(one, terms.floor * rng.uniform(1.0, 6.0), limits)
    return states


def compare_flush(seed: int) -> int:
    """Compare searches for the fastest batch of a random problem, at several limits. Returns the number of states."""
    rng = random.Random(f"flush {seed}")
    draw = divided_instance if seed % 4 == 3 else mixed_instance
    _, problem = drawn(seed, lambda one: draw(one, layers=7, schedule=("gpipe", "1f1b-flush")[seed % 2]))
    if not problem.cluster.uniform:
        return 0
    inner = rng.choice(plan_spaces(problem)).inner(problem)
    inner, states = replace(inner, options=replace(inner.options, boundary="single", pins=())), 0
    for _ in range(3):
        one = inner if rng.random() < 0.7 else inner.without_memory_limit()
        memory = one.options.memory
        floor_s = BatchLimit(CostTerms(one, enumerate_cuts(one, 1000)), math.inf).floor_s
        limit_s, band = floor_s * rng.uniform(1.0, 3.0), (0.0, math.inf)
        if seed % 2 and rng.random() < 0.5:
            band = tuple(sorted(rng.uniform(0.0, limit_s) for _ in range(2)))
        limits = SearchLimits(
            memory=memory,
            recompute=memory and rng.random() < 0.5,
            coarse=rng.random() < 0.2,
            counting=(counting := rng.choice(COUNTS)),
            exact_stages=rng.randint(1, 4) if counting.exact_stages else None,
            max_stages=rng.randint(1, 4) if counting.stages else None,
            max_workers=rng.randint(1, inner.cluster.workers) if counting.workers else None,
        )
        states += assert_equal(one, limit_s, limits, partial(FlushSearch, steady_s=band))
    return states


def compare_vertical(seed: int) -> int:
    """Compare searches under vertical sync for some input stages. Returns the number of states."""
    rng = random.Random(f"vertical {seed}")
    draw = divided_instance if seed % 4 == 3 else mixed_instance
    _, problem = drawn(seed, lambda one: draw(one, layers=7, schedule="vertical-sync"))
    if not problem.cluster.uniform or not problem.training:
        return 0
    inner = rng.choice(plan_spaces(problem)).inner(problem)
    inner, states = replace(inner, options=replace(inner.options, boundary="single", pins=(), memory=True)), 0
    terms = CostTerms(inner, enumerate_cuts(inner, 1000))
    for kind in (InputStage, AnyInputStage):
        most = inner.cluster.workers if kind is InputStage else 1
        first = kind(rng.randint(1, most), rng.randint(1, 2 + inner.cluster.workers))
        limits = SearchLimits(memory=True, recompute=rng.random() < 0.5)
        states += assert_equal(inner, terms.floor * rng.uniform(1.0, 6.0), limits, VerticalSearch, first)
    return states


def compare_answer(seed: int) -> int:
    """Solve a random problem with loops alone, and compare with brute force. Returns 1 if there is a plan."""
    instance, _ = drawn(seed, lambda one: mixed_instance(one, layers=5, schedule="1f1b-stashing"))
    instance = replace(_at_times_roomy(instance, seed), contention=False, boundary="single")
    problem = to_problem(instance)
    use_loops(0.0)
    result, best_s = dynamic_program.solve(problem, enumerate_cuts(problem, 1000)), brute_force.best(instance)
    assert result.objective_s == best_s or math.isclose(result.objective_s, best_s, rel_tol=1e-6), seed
    return int(best_s < math.inf)


def compare_long(seed: int) -> int:
    """Compare searches for a chain of 60 layers on 64 workers whose memory binds. Returns the number of states."""
    rng, profile = random.Random(seed), long_chain(60, seed=seed)
    sizes = random.Random(f"workspace {seed}")
    layers = [replace(one, workspace_bytes=sizes.randint(0, one.saved_bytes * 20)) for one in profile.layers]
    profile = replace(profile, layers=tuple(layers))
    levels = (Level("server", 4, 2e10, 1e-6), Level("rack", 4, 5e9, 2e-6), Level("all", 4, 1e9, 2e-5))
    whole = sum(layer.parameter_bytes * 4 + layer.saved_bytes for layer in profile.layers)
    cluster = Cluster("c", Device("d", "cuda", int(0.3 * whole)), levels)
    options = Options(contention=False, shard_optimizer=seed % 2 == 1)
    problem = Problem(profile, cluster, options)
    terms, states = CostTerms(problem, enumerate_cuts(problem, 1000)), 0
    for memory in (False, True):
        one = problem if memory else problem.without_memory_limit()
        limits = SearchLimits(memory=memory, recompute=memory)
        states += assert_equal(one, terms.floor * rng.uniform(1.0, 1.3), limits)
    return states


_KINDS: dict[str, Callable[[int], int]] = {
    "graphs": compare,
    "chains": compare_long,
    "answers": compare_answer,
    "flush": compare_flush,
    "vertical": compare_vertical,
}


def main() -> None:
    """Compare, and print how much was compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("what", choices=tuple(_KINDS), help="what is compared")
    given = parser.parse_args()
    print(sum(_KINDS[given.what](seed) for seed in range(given.first, given.end)))


if __name__ == "__main__":
    main()
