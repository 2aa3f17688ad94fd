"""Random problems and plans of the schedules with a flush, of one to five layers on eight workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cost import depths
from pipeplan.cost.virtual_stages import with_depths
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import VIRTUAL
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights

SHAPES = {1: [(8,)], 2: [(2, 4), (4, 2)], 3: [(2, 2, 2)]}
"""Clusters of one to three levels."""


def _problem(rng: random.Random, schedule: str, stages: int) -> Problem:
    layers = [
        Layer(
            f"l{index}",
            rng.uniform(0.1, 1.0),
            rng.uniform(0.1, 2.0),
            rng.choice((0, 10, 100, 400)),
            1,
            update_s=rng.choice((0.0, 0.0, 0.3)),
        )
        for index in range(stages)
    ]
    tensors = [
        Tensor(f"t{index}", f"l{index}", (f"l{index + 1}",), *(rng.choice((0, 5, 40)) for _ in range(2)))
        for index in range(stages - 1)
    ]
    rates = sorted((rng.choice((20.0, 100.0, 400.0)) for _ in range(3)), reverse=True)
    shape = rng.choice(SHAPES[rng.randint(1, 3)])
    levels = [Level(f"n{k}", count, rates[k], rng.choice((0.0, 0.05))) for k, count in enumerate(shape)]
    costs = ExecutorCosts(*rng.choice(((0.0, 0.0, 0.0, 0.0), (0.05, 0.02, 1e-3, 0.0))))
    tied: tuple[TiedWeights, ...] = ()
    if schedule not in VIRTUAL and stages > 2 and rng.random() < 0.2:
        tied = (TiedWeights(("w",), (layers[0].name, layers[-1].name), 50),)
        layers[0] = replace(layers[0], parameter_bytes=layers[0].parameter_bytes + 50)
    cluster = Cluster("flat", Device("d", "cuda", 10**9, cores=rng.choice((0, 0, 2))), tuple(levels), executor=costs)
    options = Options(
        schedule=schedule,
        accumulate=rng.choice((4, 6, 8, 16)),
        contention=rng.random() < 0.6,
        overlap=rng.choice((1.0, 0.5, 0.0)),
        boundary=rng.choice(("single", "parallel")),
        sharding=Sharding.OPTIMIZER if rng.random() < 0.1 else Sharding.NONE,
    )
    return Problem(Profile(tuple(layers), tuple(tensors), 1, optimizer_state_ratio=1.0, tied=tied), cluster, options)


def _plan(rng: random.Random, problem: Problem, schedule: str) -> Plan:
    """A plan with the planner's depths: of workers with several stages each, or with one, in one or two copies."""
    count = len(problem.profile.layers)
    names = [(layer.name,) for layer in problem.profile.layers]
    accumulate = problem.options.accumulate
    if schedule in VIRTUAL:
        devices, replicas = count // 2, rng.choice((1, 2))
        homes = [*range(devices), *(range(devices) if schedule == "interleaved-1f1b" else reversed(range(devices)))]
        workers = [tuple(range(home * replicas, (home + 1) * replicas)) for home in homes]
        stages = tuple(Stage(name, mine, 1, 1) for name, mine in zip(names, workers, strict=True))
        return with_depths(Plan(stages, schedule=schedule, accumulate=accumulate))
    copies = 2 if rng.random() < 0.2 and count <= 4 and len(problem.cluster.levels) > 1 else 1
    room, first, stages = 8 // copies, 0, ()
    for index, name in enumerate(names):
        replicas = rng.randint(1, min(3, room - first - (count - index - 1)))
        mine = tuple(copy * (8 // copies) + first + one for one in range(replicas) for copy in range(copies))
        stages, first = (*stages, Stage(name, mine, 1, 1, recompute=rng.random() < 0.2)), first + replicas
    plan = Plan(stages, copies, schedule=schedule, accumulate=accumulate)
    return depths.assign_depths(plan, problem, 1.0)


def drawn_flush_plans(schedule: str, seeds: range) -> Iterator[tuple[int, Plan, Problem]]:
    """Yield (seed, plan, its problem) for every seed."""
    for seed in seeds:
        rng = random.Random(f"{schedule} {seed}")
        count = 2 * rng.randint(2, 3) if schedule in VIRTUAL else rng.randint(1, 5)
        problem = _problem(rng, schedule, count)
        yield seed, _plan(rng, problem, schedule), problem
