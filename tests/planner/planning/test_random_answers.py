"""Answers for random problems: nothing that is known to be possible is faster than the answer by over 3%.

The answer is compared with every plan that its own searches have simulated, with the plans of an independent random
search, with the answers for clusters that have less or more of something, and with those to constrained questions.
All 300 problems take half an hour: `pytest -m slow tests/planner/planning/test_random_answers.py`. Other seeds, with
the CPU seconds of each: `PYTHONPATH=tests/support python tests/planner/planning/test_random_answers.py 300 400`.
"""

from __future__ import annotations

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
from pipeplan.planning.question import Machines, problem_of
from pipeplan.planning.settings import Settings
from pipeplan.problem.options import Sharding
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

FEW = 12
"""The problems of the default suite, each with one easier and one harder question."""
SEEDS = slow_but_for(range(FEW), range(300))
QUICK = Settings(solver="dp", certify=False, compare=False, time_limit_s=None)
ROUNDING = 1e-9


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


def _given(seed: int) -> tuple[Machines, int]:
    rng = random.Random(seed)
    machines = Machines(_profile(rng), _cluster(rng))
    return machines, machines.profile.minibatch * machines.cluster.workers * rng.choice([1, 2])


def _answer(machines: Machines, batch: int, **options: Any) -> Outcome | None:
    """The answer; None where no plan fits."""
    try:
        return pipeplan.solve(machines.profile, machines.cluster, settings=QUICK, batch=batch, **options)
    except pipeplan.InfeasibleError:
        return None


def _sample_s(outcome: Outcome | None) -> float:
    """Seconds per sample; infinite where no plan fits."""
    return math.inf if outcome is None else outcome.predicted_s / outcome.problem.profile.minibatch


def _easier(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with more of one thing: servers, bandwidth, memory."""
    if len(cluster.levels) > 1:
        yield cluster.with_servers(2 * cluster.servers)
    yield replace(cluster, levels=tuple(replace(one, bandwidth=4 * one.bandwidth) for one in cluster.levels))
    yield replace(cluster, device=replace(cluster.device, memory_bytes=2 * cluster.device.memory_bytes))


def _constraints(machines: Machines) -> Iterator[dict[str, Any]]:
    names = [layer.name for layer in machines.profile.layers]
    yield {"stages": 2}
    yield {"max_replicas": 1}
    yield {"max_workers": max(1, machines.cluster.workers // 2)}
    yield {"no_cut_after": (names[len(names) // 2],)}
    yield {"recompute": False}


def failures(seed: int) -> Iterator[str]:
    """What is wrong with the answer to a random problem, as lines that begin with the kind of the fault."""
    figure.REMEMBERED, figure._REMEMBERED = 10**6, (simulated := OrderedDict[Any, figure.Figure]())
    machines, batch = _given(seed)
    answer = _answer(machines, batch)
    if answer is None:
        return
    answer_s, size = _sample_s(answer), machines.profile.minibatch
    for (problem, plan), found in list(simulated.items()):
        same = plan.accumulate is not None and plan.accumulate * problem.profile.minibatch == batch
        if same and Updates.of(plan, problem.profile.minibatch).synchronous:
            other_s = found.step_s / problem.profile.minibatch
            if other_s * (1 + TOLERANCE) < answer_s * (1 - ROUNDING):
                yield f"simulated: {plan.config}, {plan.schedule}: {other_s:.6g} < {answer_s:.6g} s"
    problem = problem_of(machines, answer.problem.options, size, batch, grid=False, sharding=Sharding.NONE)
    walk = RandomWalk(problem, random.Random(seed), answer_s / (1 + TOLERANCE) * size)
    walk.run(starts=2, moves=40)
    if walk.fastest_s < walk.useful_s * (1 - ROUNDING):
        yield f"random search: {walk.fastest_s / size:.6g} < {answer_s:.6g} s"
    easier = list(_easier(machines.cluster))
    for cluster in easier if seed >= FEW else easier[seed % len(easier) :][:1]:
        more_s = _sample_s(_answer(Machines(machines.profile, cluster), batch))
        if more_s > answer_s * (1 + TOLERANCE) * (1 + ROUNDING):
            yield f"better cluster: {more_s:.6g} > {answer_s:.6g} s with {cluster}"
    harder = list(_constraints(machines))
    for options in harder if seed >= FEW else harder[seed % len(harder) :][:1]:
        held_s = _sample_s(_answer(machines, batch, **options))
        if held_s * (1 + TOLERANCE) * (1 + ROUNDING) < answer_s:
            yield f"constraint: {held_s:.6g} < {answer_s:.6g} s with {options}"


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_known_is_faster_than_the_answer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure, "_REMEMBERED", figure._REMEMBERED)
    monkeypatch.setattr(figure, "REMEMBERED", figure.REMEMBERED)
    assert list(failures(seed)) == []


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        began = time.process_time()
        wrong = list(failures(number))
        print(number, f"{time.process_time() - began:.1f} s", *wrong or ["good"], sep="\t", flush=True)
