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
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from extents import slow_but_for
from random_plans import RandomWalk

import pipeplan
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.plan.plan import Plan
from pipeplan.plan.updates import Updates
from pipeplan.planning import figure
from pipeplan.planning.figure import TOLERANCE
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.question import Machines, problem_of, sizes_for
from pipeplan.planning.settings import Settings
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile

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


@pytest.mark.parametrize("case", CASES)
def test_no_plan_of_a_random_search_is_faster(case: str) -> None:
    given = _machines(case)
    outcome = _solved(given)
    assert outcome.choice is not None
    samples, reached = outcome.choice.samples, math.inf
    for size in sizes_for(given.profile, samples, None)[0]:
        problem = problem_of(given, outcome.problem.options, size, samples, grid=False)
        useful_s = _sample_s(outcome) / (1 + TOLERANCE) * size
        walk = RandomWalk(problem, random.Random(f"{case}-{size}"), useful_s)
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
