"""What must hold between the answers to related problems, whatever the formulas: on random problems of every kind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from brute_machines import Instance
from instances import (
    ALL_SCHEDULES,
    crowded_instance,
    drawn,
    mixed_instance,
    random_instance,
    to_problem,
    unequal_instance,
)
from solver_contract import solve_by_dp

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile

SLACK = 1 + 1e-8
"""Two searches for the same number."""
MOST = 60
"""The most problems for a property that is of no account for the first."""

Change = Callable[[Problem], Problem]


def _problems(start: int, count: int, **options: Any) -> Iterator[Problem]:
    """Problems of every kind, with some options set."""
    for seed in range(start, start + count):
        kind = unequal_instance if seed % 4 == 3 else mixed_instance
        schedule = ALL_SCHEDULES[seed % 5] if seed % 6 else None
        _, problem = drawn(seed, lambda number: kind(number, layers=5, schedule=schedule))  # noqa: B023
        yield _with(problem, **options)


@pytest.fixture(params=[2, pytest.param(6, marks=pytest.mark.slow)], ids=["few", "more"])
def count(request: pytest.FixtureRequest) -> int:
    """How many problems a property is held to, where that is of account for one of them; most take twice as many."""
    return int(request.param)


def _step_time(problem: Problem) -> float:
    return solve_by_dp(problem).objective_s


def _with(problem: Problem, **options: Any) -> Problem:
    return replace(problem, options=replace(problem.options, **options))


def _free(problem: Problem) -> Problem:
    """The problem without the user's constraints."""
    nothing: dict[str, Any] = dict.fromkeys(("stages", "max_stages", "max_replicas", "max_workers"))
    return _with(problem, **nothing, pins=(), together=(), no_cut_after=())


def _same(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=1e-8)


def _memory(problem: Problem, size: Callable[[int], int]) -> Problem:
    """The problem with other sizes of memory."""

    def changed(device: Any) -> Any:
        return replace(device, memory_bytes=size(device.memory_bytes))

    machines = tuple(replace(server, device=changed(server.device)) for server in problem.cluster.machines)
    return problem.within(replace(problem.cluster, device=changed(problem.cluster.device), machines=machines))


# More is never worse.


def _enlarged(instance: Instance, rng: random.Random) -> Iterator[tuple[str, Instance]]:
    """The instance with one more worker or server, or a faster link, and what that is."""
    levels, servers = instance.levels, instance.servers
    number = rng.randrange(bool(servers), len(levels))
    count, bandwidth, *rest = levels[number]
    faster_level = [*levels[:number], (count, 2.5 * bandwidth, *rest), *levels[number + 1 :]]
    yield "a faster link", replace(instance, levels=faster_level)
    count, *rest = levels[-1]
    larger = replace(instance, levels=[*levels[:-1], (count + 1, *rest)])
    if not servers:
        yield "one more server" if len(levels) > 1 else "one more worker", larger
        return
    added = [rng.choice(servers) for _ in range(len(servers) // int(count))]
    speed, card = rng.choice([0.5, 1.0, 4.0]), rng.choice([0.0, 1.0, 20.0])
    more = tuple(replace(one, speed=speed * one.speed, card=card) for one in added)
    yield "one more server at the end", replace(larger, servers=(*servers, *more))
    changed = rng.randrange(len(servers))
    faster = replace(servers[changed], card=2.5 * servers[changed].card)
    if len(levels) == 2:
        yield "a faster card", replace(instance, servers=(*servers[:changed], faster, *servers[changed + 1 :]))
    # Where only one of several equal servers had faster links inside, copies could no longer be on all of them.
    link = servers[changed].level
    quick = [replace(one, level=(2.5 * link[0], *link[1:])) if one.level == link else one for one in servers]
    yield "a faster link", replace(instance, servers=tuple(quick))


@pytest.mark.parametrize(
    "seeds",
    [range(30), *(pytest.param(range(n, n + 200), marks=pytest.mark.slow) for n in range(1000, 3000, 200))],
    ids=str,
)
def test_one_more_worker_or_server_or_a_faster_link_is_never_worse(seeds: range) -> None:
    """On clusters of all kinds, under all schedules, and in a half of the cases with everything charged."""
    helped = set()
    for seed in seeds:
        draw = (random_instance, mixed_instance, unequal_instance, crowded_instance)[seed % 4]
        fields = {} if draw is random_instance else {"schedule": ALL_SCHEDULES[seed // 4 % 5]}
        charged, layers = seed // 20 % 2 == 0, 4 if seed < 1000 else 5
        instance, problem = drawn(seed, lambda n: replace(draw(n, layers=layers, **fields), contention=charged))  # noqa: B023
        before = _step_time(problem)
        for what, larger in _enlarged(instance, random.Random(seed)) if before < math.inf else ():
            try:
                after = _step_time(to_problem(larger))
            except InputError:
                continue
            assert after <= before * SLACK, (seed, what, instance)
            helped |= {what} if after < before / SLACK else set()
    assert helped >= {"a faster link", "one more worker", "one more server", "one more server at the end"}


BETTER: dict[str, tuple[Change, dict[str, Any], int]] = {
    "memory": (lambda one: _memory(one, lambda size: int(1.5 * size)), {}, 840),
    "memory without end": (lambda one: _with(one, memory=False), {}, 840),
    "parallel boundaries": (lambda one: _with(one, boundary="parallel"), {"boundary": "single"}, 840),
    "recomputation": (lambda one: _with(one, recompute=True), {"recompute": False}, 56),
    "overlap": (lambda one: _with(one, overlap=1.0), {}, 840),
    "inference": (lambda one: _with(one, inference=True), {}, 840),
    "no constraints": (_free, {}, 840),
}


@pytest.mark.parametrize("better", BETTER)
def test_more_of_anything_is_never_worse(better: str, count: int) -> None:
    change, options, start = BETTER[better]
    gained = 0
    for number, problem in enumerate(_problems(start, MOST, **options)):
        if number >= count and gained:
            break
        before, after = _step_time(problem), _step_time(change(problem))
        assert after <= before * SLACK, problem
        gained += after < before / SLACK
    assert gained, "nothing depended on it: the problems show nothing"


# The same problem in other words.


def _links(cluster: Cluster, rate: float, latency: float) -> Cluster:
    """A cluster with all bandwidths and latencies multiplied."""

    def changed(level: Any) -> Any:
        return replace(level, bandwidth=rate * level.bandwidth, latency_s=latency * level.latency_s)

    machines = (replace(one, card=rate * one.card, inside=changed(one.inside)) for one in cluster.machines)
    return replace(cluster, levels=tuple(map(changed, cluster.levels)), machines=tuple(machines))


def test_scaling_all_times_scales_the_answer(count: int) -> None:
    for seed, problem in enumerate(_problems(520, 2 * count)):
        factor = (3.0, 0.25, 1 / 128)[seed % 3]
        layers = tuple(
            replace(layer, **{time: factor * getattr(layer, time) for time in ("forward_s", "backward_s", "update_s")})
            for layer in problem.profile.layers
        )
        profile = replace(problem.profile, layers=layers)
        scaled = replace(problem, profile=profile, cluster=_links(problem.cluster, 1 / factor, factor))
        assert _same(_step_time(scaled), factor * _step_time(problem)), problem


@pytest.mark.slow
def test_the_order_and_the_names_of_layers_do_not_matter(count: int) -> None:
    for seed, problem in enumerate(_problems(540, 2 * count)):
        profile, new = _relabelled(problem.profile, seed)
        options = replace(
            problem.options,
            pins=tuple((new[name], stage) for name, stage in problem.options.pins),
            together=tuple(tuple(new[name] for name in group) for group in problem.options.together),
            no_cut_after=tuple(new[name] for name in problem.options.no_cut_after),
        )
        assert _same(_step_time(Problem(profile, problem.cluster, options)), _step_time(problem)), problem


def _relabelled(profile: Profile, seed: int) -> tuple[Profile, dict[str, str]]:
    rng = random.Random(seed)
    names = [f"n{number}" for number in rng.sample(range(100), len(profile.layers))]
    new = dict(zip((layer.name for layer in profile.layers), names, strict=True))
    layers = [replace(layer, name=new[layer.name]) for layer in profile.layers]
    tensors = [
        replace(t, producer=new[t.producer], consumers=tuple(new[c] for c in t.consumers)) for t in profile.tensors
    ]
    rng.shuffle(layers)
    rng.shuffle(tensors)
    together = tuple(tuple(new[name] for name in group) for group in profile.together)
    return replace(profile, layers=tuple(layers), tensors=tuple(tensors), together=together), new


def test_levels_that_join_nothing_new_and_memory_that_does_not_bind_change_nothing(count: int) -> None:
    """A level of one, a level split into two of the same rate, and as much memory as if there were no limit."""
    split = 0
    for problem in _problems(560, 4 * count, allow_copies=False):
        cluster, best = problem.cluster, _step_time(problem)
        top = replace(cluster.levels[-1], count=1, bandwidth=1.0, latency_s=9.0)
        assert _same(_step_time(problem.within(replace(cluster, levels=(*cluster.levels, top)))), best), problem
        rich = _with(_memory(problem, lambda size: 10**15), memory=True)
        assert _same(_step_time(rich), _step_time(_with(problem, memory=False))), problem
        for index, level in enumerate(cluster.levels):
            if not cluster.machines and level.count in (4, 6):
                halves = (replace(level, count=2), replace(level, count=level.count // 2))
                levels = (*cluster.levels[:index], *halves, *cluster.levels[index + 1 :])
                assert _same(_step_time(problem.within(replace(cluster, levels=levels))), best), problem
                split += 1
    assert split


def test_the_same_problem_gives_the_same_plan(count: int) -> None:
    for problem in _problems(660, 2 * count):
        assert len({str(solve_by_dp(problem).plan) for _ in range(2)}) == 1
