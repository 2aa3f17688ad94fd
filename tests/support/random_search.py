"""A random search for plans of a problem, independent of the planner's own searches."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import FLUSH
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.figure import figure_of
from pipeplan.problem.problem import Problem
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
