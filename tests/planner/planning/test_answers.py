"""Answers for the bundled profiles: nothing that is known to be possible is faster than the answer by over 3%.

The answer is compared with every plan that its own searches have simulated, with the plans of a random search that is
independent of these, and with the answers to questions that are easier or harder.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from extents import slow_but_for

import pipeplan
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import FLUSH
from pipeplan.plan.updates import Updates
from pipeplan.planning import figure
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.candidates import Machines, problem_of, sizes_for
from pipeplan.planning.figure import figure_of
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.simplicity import TOLERANCE
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import NO_DEADLINE

PROFILES = ("mnist", "alexnet", "awd-lm", "vgg16", "resnet50", "s2vt", "gnmt8", "gnmt16")
CASES = slow_but_for(["mnist-C"], [f"{name}-{cluster}" for name in PROFILES for cluster in "ABC"])
QUICK = Settings(solver="dp", certify=False, compare=False, time_limit_s=None)


def _machines(case: str) -> Machines:
    """The profile and the cluster of a case."""
    name, _, cluster = case.rpartition("-")
    return Machines(pipeplan.read_profile(f"{name}-v100"), pipeplan.cluster(cluster))


def _sample_s(outcome: Outcome) -> float:
    """Seconds per sample of an answer."""
    return outcome.predicted_s / outcome.problem.profile.minibatch


def _solved(given: Machines, **options: Any) -> Outcome:
    """The answer for one microbatch on every worker of the given cluster."""
    return _answer(given.profile, given.cluster, given.profile.minibatch * given.cluster.workers, **options)


@cache
def _answer(profile: Profile, cluster: Cluster, batch: int, **options: Any) -> Outcome:
    return pipeplan.solve(profile, cluster, settings=QUICK, batch=batch, **options)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[tuple[Problem, Plan], figure.Figure]:
    """The figures of all plans that are simulated from now on."""
    known: OrderedDict[tuple[Problem, Plan], figure.Figure] = OrderedDict()
    monkeypatch.setattr(figure, "_REMEMBERED", known)
    monkeypatch.setattr(figure, "REMEMBERED", 10**6)
    return known


@pytest.mark.parametrize("case", CASES)
def test_no_plan_that_was_simulated_on_the_way_is_faster(
    case: str, simulated: OrderedDict[tuple[Problem, Plan], figure.Figure]
) -> None:
    given = _machines(case)
    outcome = pipeplan.solve(given.profile, given.cluster, settings=QUICK)
    assert outcome.choice is not None
    samples, compared = outcome.choice.samples, 0
    for (problem, plan), found in simulated.items():
        size = problem.profile.minibatch
        if plan.accumulate is None or plan.accumulate * size != samples or not Updates.of(plan, size).synchronous:
            continue
        assert found.step_s / size * (1 + TOLERANCE) >= _sample_s(outcome) * (1 - 1e-9), (plan.config, plan.schedule)
        compared += 1
    assert compared > 2
    assert _sample_s(outcome) <= outcome.choice.taken.sample_s * (1 + 1e-9), "the answer is the choice, or faster"


# -- a random search --


@dataclass
class _Walk:
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
        if score.pace_s >= self.useful_s or not self.left:
            return score.pace_s
        self.left -= 1
        step_s = figure_of(plan, score, problem, NO_DEADLINE).step_s
        self.fastest_s = min(self.fastest_s, step_s)
        return step_s


@pytest.mark.parametrize("case", CASES)
def test_no_plan_of_a_random_search_is_faster(case: str) -> None:
    given = _machines(case)
    outcome = _solved(given)
    assert outcome.choice is not None
    samples, reached = outcome.choice.samples, math.inf
    for size in sizes_for(given.profile, samples, None)[0]:
        problem = problem_of(given, outcome.problem.options, size, samples, grid=False)
        useful_s = _sample_s(outcome) / (1 + TOLERANCE) * size
        walk = _Walk(problem, random.Random(f"{case}-{size}"), useful_s)
        walk.run(starts=3, moves=150)
        assert walk.fastest_s >= useful_s * (1 - 1e-9), "the random search found a faster plan"
        walk = replace(walk, useful_s=useful_s * 2, left=1)
        walk.run(starts=3, moves=150)
        reached = min(reached, walk.fastest_s)
    assert reached < math.inf, "the random search simulates plans"


# -- easier and harder questions --


def _with_levels(cluster: Cluster, factor: float) -> Cluster:
    levels = tuple(replace(level, bandwidth=level.bandwidth * factor) for level in cluster.levels)
    return replace(cluster, levels=levels)


def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(cluster.device.memory_bytes * factor)))


EASIER: dict[str, Callable[[Cluster], list[Cluster]]] = {
    "servers": lambda one: [one.with_servers(count) for count in (1, 2, 4)],
    "bandwidth": lambda one: [_with_levels(one, factor) for factor in (0.25, 1, 4)],
    "memory": lambda one: [_with_memory(one, factor) for factor in (0.5, 1, 2)],
}
"""Clusters, each with more of something than the one before."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("more", EASIER)
def test_more_of_a_cluster_is_never_slower(case: str, more: str) -> None:
    given = _machines(case)
    samples, times = given.profile.minibatch * given.cluster.workers, []
    for cluster in EASIER[more](given.cluster):
        try:
            times.append(_sample_s(_answer(given.profile, cluster, samples)))
        except pipeplan.InfeasibleError:
            times.append(math.inf)
    assert times[-1] < math.inf
    for less_s, more_s in itertools.pairwise(times):
        assert more_s <= less_s * (1 + TOLERANCE), times


def _constraints(given: Machines) -> Iterator[dict[str, Any]]:
    names = [layer.name for layer in given.profile.layers]
    yield {"stages": 2}
    yield {"max_stages": 2}
    yield {"max_replicas": 1}
    yield {"max_workers": max(1, given.cluster.workers // 2)}
    yield {"no_cut_after": (names[len(names) // 2],)}
    yield {"recompute": False}


@pytest.mark.parametrize("case", CASES)
def test_a_constraint_is_never_faster(case: str) -> None:
    given = _machines(case)
    free_s = _sample_s(_solved(given))
    for options in _constraints(given):
        try:
            held_s = _sample_s(_solved(given, **options))
        except pipeplan.InfeasibleError:
            continue
        assert held_s * (1 + TOLERANCE) >= free_s, options
