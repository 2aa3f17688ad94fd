"""More is never worse: what must hold between the answers to related problems, whatever the formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from brute_machines import Instance
from extents import first_few
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

SLACK = 1 + 1e-8
"""Two searches for the same number."""
BETTER: dict[str, dict[str, Any]] = {
    "memory without end": {"memory": math.inf},
    "parallel boundaries": {"boundary": "parallel"},
    "recomputation": {"recompute": True},
    "overlap": {"overlap": 1.0},
    "inference": {"inference": True},
    "no constraints": {
        **dict.fromkeys(("stages", "max_stages", "max_replicas", "max_workers")),
        **dict.fromkeys(("pins", "joined", "no_cut_after"), ()),
    },
}


def _enlarged(instance: Instance, seed: int) -> Iterator[tuple[str, Instance]]:
    """The instance with more of something, and what that is; of `BETTER` one."""
    rng = random.Random(seed)
    yield "memory", replace(instance, memory=1.5 * instance.memory)
    what = list(BETTER)[seed % len(BETTER)]
    yield what, replace(instance, **BETTER[what])
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


@pytest.mark.parametrize("seeds", first_few(range(1000), 30))
def test_more_is_never_worse(seeds: range) -> None:
    """On clusters of all kinds, under all schedules, and in a half of the cases with everything charged."""
    helped = set()
    for seed in seeds:
        draw = (random_instance, mixed_instance, unequal_instance, crowded_instance)[seed % 4]
        fields = {} if draw is random_instance else {"schedule": ALL_SCHEDULES[seed // 4 % 5]}
        charged = seed // 20 % 2 == 0
        instance, problem = drawn(seed, lambda n: replace(draw(n, layers=4, **fields), contention=charged))  # noqa: B023
        before = solve_by_dp(problem)
        assert seed % 5 or solve_by_dp(problem).plan == before.plan, "the same problem gives the same plan"
        for what, larger in _enlarged(instance, seed) if before.plan is not None else ():
            try:
                after_s = solve_by_dp(to_problem(larger)).objective_s
            except InputError:
                continue
            assert after_s <= before.objective_s * SLACK, (seed, what, instance)
            helped |= {what} if after_s < before.objective_s / SLACK else set()
    assert helped >= {"a faster link", "one more worker", "one more server", "one more server at the end"}
