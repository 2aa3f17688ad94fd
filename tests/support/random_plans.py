"""Plans drawn at random: a search independent of the planner's own, and plans of the schedules with a flush."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.virtual_stages import with_depths
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import FLUSH, VIRTUAL
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.figure import figure_of
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.util.deadline import NO_DEADLINE


@dataclass
class RandomWalk:
    """A random walk over the plans of a problem, which prefers faster ones."""

    problem: Problem
    rng: random.Random
    useful_s: float
    """Plans are simulated only if their time by the formulas, a lower bound, is less than this."""
    left: int = 12
    """Simulations that may still be made."""
    fastest_s: float = math.inf
    """The shortest step time that was simulated, in seconds per microbatch."""

    def run(self, starts: int, moves: int) -> None:
        for _ in range(starts):
            here = self._start()
            cost_s = self._cost_s(here)
            for move in range(moves):
                there = self._moved(here)
                other_s = self._cost_s(there)
                heat = 0.2 * (1 - move / moves)
                if other_s <= cost_s * (1 + heat * self.rng.random()):
                    here, cost_s = there, other_s

    @property
    def _names(self) -> list[tuple[str, ...]]:
        return [unit.layers for unit in self.problem.units]

    def _start(self) -> list[tuple[int, int, bool]]:
        """Stages as (units, replicas, recomputes), of which every stage has at least one unit and one worker."""
        count = self.rng.randint(1, min(4, len(self._names), self.problem.cluster.workers))
        return [
            (units, replicas, False)
            for units, replicas in zip(
                self._parts(len(self._names), count), self._parts(self.problem.cluster.workers, count), strict=True
            )
        ]

    def _parts(self, total: int, count: int) -> list[int]:
        cuts = [0, *sorted(self.rng.sample(range(1, total), count - 1)), total]
        return [stop - start for start, stop in itertools.pairwise(cuts)]

    def _moved(self, stages: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
        """Units or replicas given to a neighbour, a replica left idle, a changed recomputation, or a new start."""
        rng, changed = self.rng, list(stages)
        kind, index = rng.random(), rng.randrange(len(stages))
        units, replicas, recomputes = changed[index]
        other = rng.choice([index - 1, index + 1])
        if kind < 0.05:
            return self._start()
        if kind < 0.15:
            changed[index] = units, replicas, not recomputes
        elif kind < 0.25:
            changed[index] = units, max(1, replicas - 1), recomputes
        elif 0 <= other < len(stages):
            its_units, its_replicas, its_recomputes = changed[other]
            if kind < 0.7:
                moved = rng.randint(1, max(1, units // 2)) if units > 1 else 0
                changed[index] = units - moved, replicas, recomputes
                changed[other] = its_units + moved, its_replicas, its_recomputes
            elif replicas > 1:
                changed[index] = units, replicas - 1, recomputes
                changed[other] = its_units, its_replicas + 1, its_recomputes
        return changed

    def _cost_s(self, stages: list[tuple[int, int, bool]]) -> float:
        """Seconds per microbatch: simulated where the formulas allow a plan of use, else by the formulas."""
        problem, first_unit, first_worker, made = self.problem, 0, 0, []
        for units, replicas, recomputes in stages:
            layers = tuple(name for unit in self._names[first_unit : first_unit + units] for name in unit)
            made.append(Stage(layers, tuple(range(first_worker, first_worker + replicas)), 1, 1, recomputes))
            first_unit, first_worker = first_unit + units, first_worker + replicas
        plan = Plan(tuple(made), schedule=FLUSH, accumulate=problem.options.accumulate)
        try:
            plan = depths.assign_depths(plan, problem, self.useful_s)
            score = evaluate(plan, problem)
        except InputError:
            return math.inf
        if not score.fits or not satisfies_options(plan, problem):
            return math.inf
        if score.step_time_s >= self.useful_s or not self.left:
            return score.step_time_s
        self.left -= 1
        step_s = figure_of(plan, score, problem, NO_DEADLINE).step_s
        self.fastest_s = min(self.fastest_s, step_s)
        return step_s


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
