"""Best cuts for given replica counts, and ranks, against trying everything with the evaluator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import dynamic_program
from table1.configurations import Configurations


def problem(seed: int, *, contention: bool = False) -> Problem:
    """Five layers on 2 servers of 2, links slow enough to matter."""
    rng = random.Random(seed)
    layers = tuple(
        Layer(f"l{i}", rng.uniform(0.5, 3), rng.uniform(0.5, 3), rng.choice([0, 10, 60]), 0) for i in range(5)
    )
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), rng.randint(1, 40), rng.randint(1, 40)) for i in range(4))
    levels = Level("server", 2, 20.0, 0.0, 0.9, 0.5), Level("cluster", 2, 10.0, 0.0, 0.5, 0.8)
    cluster = Cluster("", Device("", "cuda", 1), levels)
    return Problem(Profile(layers, tensors, 1), cluster, Options(memory=False, contention=contention))


def plans(given: Problem, replicas: tuple[int, ...]) -> Iterator[Plan]:
    """Every way to cut the chain for these replica counts, on consecutive workers."""
    names = [layer.name for layer in given.profile.layers]
    for cuts in itertools.combinations(range(1, len(names)), len(replicas) - 1):
        ends, stages, position = (0, *cuts, len(names)), [], 0
        for (start, end), count in zip(itertools.pairwise(ends), replicas, strict=True):
            stages.append(Stage(tuple(names[start:end]), tuple(range(position, position + count)), 9, 9))
            position += count
        # Deep enough for any pace: what is compared are stages and boundaries.
        yield depths.assign_depths(Plan(tuple(stages)), given, 1e-3)


def least(given: Problem, replicas: tuple[int, ...]) -> float:
    return min((evaluate(plan, given).alone_s for plan in plans(given, replicas)), default=float("inf"))


def compositions(workers: int) -> list[tuple[int, ...]]:
    """All lists of replica counts that so many workers allow."""
    counts = range(1, workers + 1)
    lists = (found for length in counts for found in itertools.product(counts, repeat=length))
    return [found for found in lists if sum(found) <= workers]


@pytest.mark.parametrize("seed", range(3))
def test_the_cuts_for_replica_counts_are_the_best_of_all(seed: int) -> None:
    given = problem(seed)
    configurations = Configurations.of(given, enumerate_cuts(given, 100))
    for replicas in compositions(4):
        plan, score = configurations.best(replicas)
        assert score.alone_s == pytest.approx(least(given, replicas), rel=1e-9)
        assert plan.config == "-".join(map(str, replicas))


@pytest.mark.parametrize("seed", range(3))
def test_the_rank_counts_what_is_faster(seed: int) -> None:
    given = problem(seed)
    alone = replace(given, options=replace(given.options, allow_copies=False))
    configurations = Configurations.of(alone, enumerate_cuts(alone, 100))
    paces = [least(given, replicas) for replicas in compositions(4)]
    for pace in sorted(paces)[::4]:
        rank = configurations.rank(pace)
        assert rank.better == sum(other < pace * (1 - 1e-9) for other in paces)
        assert rank.among == len(paces) == 15


def test_the_rank_takes_data_parallelism_as_if_it_never_waited() -> None:
    """At the longer of its passes and its all-reduce; what is predicted of it has its forward pass wait besides."""
    given = problem(0, contention=True)
    given = replace(given, options=replace(given.options, allow_copies=False))
    configurations = Configurations.of(given, enumerate_cuts(given, 100))
    _, score = configurations.best((4,))
    passes_s = sum(layer.forward_s + layer.backward_s for layer in given.profile.layers)
    allreduce_s = 2 * 3 / 4 * sum(layer.parameter_bytes for layer in given.profile.layers) / 5.0
    assert score.alone_s == pytest.approx(max(passes_s, allreduce_s) / 4)
    assert score.pace_s > score.alone_s * 1.01
    below, above = (configurations.rank(score.alone_s * factor).better for factor in (1 - 1e-6, 1 + 1e-6))
    assert above == below + 1


def test_the_best_of_all_configurations_is_what_the_solver_finds() -> None:
    given = problem(7)
    cuts = enumerate_cuts(given, 100)
    found = dynamic_program.solve(given, cuts)
    rank = Configurations.of(given, cuts).rank(found.objective_s)
    assert rank.place == 1
    assert rank.among == 15 + 3, "those of 4 workers, and copies of those of 2 in each server"


def test_on_shared_cards_other_cuts_are_tried() -> None:
    given = problem(3, contention=True)
    configurations = Configurations.of(given, enumerate_cuts(given, 100))
    for replicas in ((1, 1, 1, 1), (1, 2, 1), (2, 1, 1)):
        paces = [evaluate(plan, given).pace_s for plan in plans(given, replicas)]
        first, best = configurations.first(replicas)[1].pace_s, configurations.best(replicas)[1].pace_s
        assert min(paces) * (1 - 1e-9) <= best <= first


def test_what_cannot_be_is_refused() -> None:
    given = problem(0)
    configurations = Configurations.of(given, enumerate_cuts(given, 100))
    with pytest.raises(InputError, match="3-2 needs 5 workers, of 4"):
        configurations.best((3, 2))
    assert configurations.most_stages == 5
