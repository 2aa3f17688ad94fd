"""Answers for random problems and bundled profiles: nothing that is known to be possible is faster by over 3%.

The answer is compared with every plan that its own searches have simulated, with the plans of an independent random
search, with the answers for clusters that have less or more of something, and with those to constrained questions.
All random problems take half an hour: `pytest -m slow -k random tests/planner/planning/test_answers.py`. Other seeds,
with the CPU seconds of each: `PYTHONPATH=tests/support python tests/planner/planning/test_answers.py 300 400`.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from extents import slow_but_for
from random_plans import RandomWalk

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.plan.updates import Updates
from pipeplan.planning import figure
from pipeplan.planning.figure import TOLERANCE
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.question import Machines, problem_of, sizes_for
from pipeplan.planning.settings import Settings
from pipeplan.problem.options import Sharding
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

FEW = 12
"""The random problems of the default suite, each with one easier and one harder question."""
QUICK = Settings(solver="dp", certify=False, compare=False, time_limit_s=None)
ROUNDING = 1e-9
PROFILES = ("mnist", "alexnet", "awd-lm", "vgg16", "resnet50", "s2vt", "gnmt8", "gnmt16")
BUNDLED = [f"{name}-{cluster}" for name in PROFILES for cluster in "ABC"]
More = dict[str, tuple[float, ...]]
"""Amounts of each resource of a cluster, each more than the one before: servers, and shares of the rest."""


def _profile(rng: random.Random) -> Profile:
    """A chain of three to six layers, some with a bypass, in seconds and bytes of a GPU's order of magnitude."""
    count = rng.randint(3, 6)
    layers = tuple(
        Layer(
            f"l{number}",
            rng.choice([1e-3, 4e-3, 1e-2]),
            rng.choice([2e-3, 8e-3, 2e-2]),
            rng.choice([0, 10**6, 2 * 10**7, 10**8]),
            rng.choice([10**6, 10**7]),
        )
        for number in range(count)
    )
    tensors = []
    for number in range(count - 1):
        further = {number + 1, min(count - 1, number + rng.choice([1, 1, 2]))}
        size = rng.choice([10**4, 10**6, 10**7])
        tensors.append(Tensor(f"t{number}", f"l{number}", tuple(f"l{one}" for one in sorted(further)), size, size))
    return Profile(layers, tuple(tensors), rng.choice([1, 4]))


def _cluster(rng: random.Random) -> Cluster:
    """One or two levels of two or three components."""
    memory = rng.choice([10**9, 4 * 10**9])
    levels = [Level("server", rng.randint(2, 3), rng.choice([1e9, 1e10]), 1e-5)]
    if rng.random() < 0.6:
        levels.append(Level("cluster", 2, rng.choice([1e8, 1e9]), 5e-5))
    return Cluster("drawn", Device("chip", "cuda", memory, memory_reserve=0.05), tuple(levels))


def _answer(machines: Machines, batch: int, **options: Any) -> Outcome | None:
    """The answer; None where no plan fits."""
    try:
        return pipeplan.solve(machines.profile, machines.cluster, settings=QUICK, batch=batch, **options)
    except pipeplan.InfeasibleError:
        return None


def _sample_s(outcome: Outcome | None) -> float:
    """Seconds per sample; infinite where no plan fits."""
    return math.inf if outcome is None else outcome.predicted_s / outcome.problem.profile.minibatch


def _slower(fast_s: float, slow_s: float) -> bool:
    """Whether the one that should be faster is not, by more than the tolerance."""
    return fast_s > slow_s * (1 + TOLERANCE) * (1 + ROUNDING)


def _with(cluster: Cluster, resource: str, amount: float) -> Cluster:
    if resource == "servers":
        return cluster.with_servers(int(amount))
    if resource == "bandwidth":
        return replace(cluster, levels=tuple(replace(one, bandwidth=amount * one.bandwidth) for one in cluster.levels))
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(amount * cluster.device.memory_bytes)))


def _constraints(machines: Machines) -> list[dict[str, Any]]:
    names = [layer.name for layer in machines.profile.layers]
    half = max(1, machines.cluster.workers // 2)
    found = [{"stages": 2}, {"max_replicas": 1}, {"max_workers": half}, {"no_cut_after": (names[len(names) // 2],)}]
    return [*found, {"recompute": False}]


def _failures(
    machines: Machines, batch: int, more: More, constraints: list[dict[str, Any]], walks: tuple[int, int], name: object
) -> Iterator[str]:
    """What is wrong with the answer to a problem, as lines that begin with the kind of the fault."""
    figure.REMEMBERED, figure._REMEMBERED = 10**6, (simulated := OrderedDict[Any, figure.Figure]())
    if (answer := _answer(machines, batch)) is None:
        return
    answer_s, compared = _sample_s(answer), 0
    rates = {level.bandwidth for level in machines.cluster.levels}
    if answer.choice is not None and answer_s > answer.choice.taken.sample_s * (1 + ROUNDING):
        yield f"choice: {answer_s:.6g} > {answer.choice.taken.sample_s:.6g} s"
    for (problem, plan), found in list(simulated.items()):
        size = problem.profile.minibatch
        if not {level.bandwidth for level in problem.cluster.levels} <= rates:
            continue  # with gradients in bfloat16, which is never the answer
        if plan.accumulate is not None and plan.accumulate * size == batch and Updates.of(plan, size).synchronous:
            compared += 1
            if _slower(answer_s, found.step_s / size):
                yield f"simulated: {plan.config}, {plan.schedule}: {found.step_s / size:.6g} < {answer_s:.6g} s"
    for size in sizes_for(machines.profile, batch, None)[0]:
        problem = problem_of(machines, answer.problem.options, size, batch, grid=False, sharding=Sharding.NONE)
        walk = RandomWalk(problem, random.Random(name), answer_s / (1 + TOLERANCE) * size)
        walk.run(*walks)
        if walk.fastest_s < walk.useful_s * (1 - ROUNDING):
            yield f"random search: {walk.fastest_s / size:.6g} < {answer_s:.6g} s"
    for resource, amounts in more.items():
        clusters = [_with(machines.cluster, resource, amount) for amount in amounts]
        times = [
            answer_s if one == machines.cluster else _sample_s(_answer(Machines(machines.profile, one), batch))
            for one in clusters
        ]
        if any(itertools.starmap(_slower, zip(times[1:], times, strict=False))):
            yield f"better cluster: {resource} {amounts}: {times}"
    for options in constraints:
        if _slower(answer_s, held_s := _sample_s(_answer(machines, batch, **options))):
            yield f"constraint: {held_s:.6g} < {answer_s:.6g} s with {options}"
    if isinstance(name, str) and compared < 3:
        yield "too few plans were simulated to compare with"


def failures_of_random(seed: int) -> list[str]:
    """What is wrong with the answer to a random problem."""
    rng = random.Random(seed)
    machines = Machines(_profile(rng), _cluster(rng))
    batch = machines.profile.minibatch * machines.cluster.workers * rng.choice([1, 2])
    servers = machines.cluster.servers
    more: More = {"servers": (servers, 2 * servers)} if len(machines.cluster.levels) > 1 else {}
    more |= {"bandwidth": (1, 4), "memory": (1, 2)}
    constraints = _constraints(machines)
    if seed < FEW:
        more = dict([list(more.items())[seed % len(more)]])
        constraints = constraints[seed % len(constraints) :][:1]
    return list(_failures(machines, batch, more, constraints, (2, 40), seed))


@pytest.fixture(autouse=True)
def figures_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the figures that are remembered."""
    monkeypatch.setattr(figure, "_REMEMBERED", figure._REMEMBERED)
    monkeypatch.setattr(figure, "REMEMBERED", figure.REMEMBERED)


@pytest.mark.parametrize("seed", slow_but_for(range(FEW), range(300)))
def test_nothing_known_is_faster_than_the_answer_to_a_random_problem(seed: int) -> None:
    assert failures_of_random(seed) == []


@pytest.mark.parametrize("case", slow_but_for(["mnist-C"], BUNDLED))
def test_nothing_known_is_faster_than_the_answer_for_a_bundled_profile(case: str) -> None:
    name, _, cluster = case.rpartition("-")
    machines = Machines(pipeplan.read_profile(f"{name}-v100"), pipeplan.cluster(cluster))
    batch = machines.profile.minibatch * machines.cluster.workers
    more: More = {"servers": (1, 2, 4), "bandwidth": (0.25, 1, 4), "memory": (0.5, 1, 2)}
    constraints = [*_constraints(machines), {"max_stages": 2}]
    if case == "mnist-C":  # that of the default suite
        more, constraints = {"servers": (2, 4)}, constraints[:1]
    assert list(_failures(machines, batch, more, constraints, (3, 150), case)) == []


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        began = time.process_time()
        wrong = failures_of_random(number)
        print(number, f"{time.process_time() - began:.1f} s", *wrong or ["good"], sep="\t", flush=True)
