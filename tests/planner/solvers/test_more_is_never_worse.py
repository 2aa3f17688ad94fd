"""One more worker, one more server or a faster link never gives a worse plan, under every option and schedule."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

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

from pipeplan.errors import InputError


def _instance(seed: int, layers: int) -> Instance:
    """Clusters of all kinds and schedules, half of them with everything charged."""
    draw = (random_instance, mixed_instance, unequal_instance, crowded_instance)[seed % 4]
    chosen = {} if draw is random_instance else {"schedule": ALL_SCHEDULES[seed // 4 % 5]}
    charged = seed // 20 % 2 == 0
    return drawn(seed, lambda number: replace(draw(number, layers=layers, **chosen), contention=charged))[0]


def _enlarged(instance: Instance, rng: random.Random) -> Iterator[tuple[str, Instance]]:
    """The instance with one more of something, and what that is."""
    levels, servers = instance.levels, instance.servers
    number = rng.randrange(bool(servers), len(levels))
    count, bandwidth, *rest = levels[number]
    yield "a faster link", replace(instance, levels=_with(levels, number, (count, 2.5 * bandwidth, *rest)))
    count, *rest = levels[-1]
    larger = replace(instance, levels=_with(levels, len(levels) - 1, (count + 1, *rest)))
    if servers:
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
    else:
        yield "one more server" if len(levels) > 1 else "one more worker", larger


def _with(levels: list[tuple[float, ...]], number: int, level: tuple[float, ...]) -> list[tuple[float, ...]]:
    return [*levels[:number], level, *levels[number + 1 :]]


def _step_time(instance: Instance) -> float:
    return solve_by_dp(to_problem(instance)).objective_s


def _assert_never_worse(seeds: range, layers: int) -> set[str]:
    """Hold the answers for more to those for less; returns what more made faster."""
    helped = set()
    for seed in seeds:
        instance = _instance(seed, layers)
        before = _step_time(instance)
        if math.isinf(before):
            continue
        for what, larger in _enlarged(instance, random.Random(seed)):
            try:
                after = _step_time(larger)
            except InputError:
                continue
            assert after <= before * (1 + 1e-8), (seed, what, instance)
            if after < before * (1 - 1e-8):
                helped.add(what)
    return helped


def test_more_is_never_worse() -> None:
    helped = _assert_never_worse(range(30), layers=4)
    assert helped >= {"a faster link", "one more worker", "one more server", "one more server at the end"}


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 3000, 100))
def test_more_is_never_worse_at_length(start: int) -> None:
    assert _assert_never_worse(range(start, start + 100), layers=5)
