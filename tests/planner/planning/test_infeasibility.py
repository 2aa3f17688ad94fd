"""Why there is no plan: the figures named are enough, and less is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from long_chains import chain

from pipeplan.cluster_data import variants
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.planning.infeasibility import diagnose
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.solvers.dp import dynamic_program

CUTS = 2000
PROFILE = chain([Layer(f"l{i}", 1.0, 2.0, 100 * (i + 1), 1000) for i in range(4)], 10)


def _problem(memory: int, workers: int = 2, servers: int = 1, options: Options | None = None) -> Problem:
    levels = (Level("server", workers, 1e3), Level("cluster", servers, 1e2))
    # Without recomputation, so that what is saved counts for every minibatch in flight.
    options = options or Options(recompute=False)
    return Problem(PROFILE, Cluster("small", Device("chip", "cuda", memory), levels), options)


def _feasible(problem: Problem) -> bool:
    return dynamic_program.is_feasible(problem, enumerate_cuts(problem, CUTS))


def test_a_layer_that_fits_nowhere_is_named_with_what_is_missing() -> None:
    found = diagnose(_problem(1200), CUTS)
    # The weights thrice (gradient, optimiser's state, one version) and what is saved.
    needed = {"l3": 2200.0, "l2": 1900.0, "l1": 1600.0, "l0": 1300.0}
    assert [(one.name, one.needs_bytes) for one in found.oversized] == list(needed.items())
    assert found.oversized[0].missing_bytes == 1000.0
    assert "layer 'l3' alone needs 2.15 KiB, 1000 B more than the 1.17 KiB of one chip" in found.text
    assert found.text.endswith("use a smaller minibatch or larger devices")
    assert found.growth is None, "no number of servers makes a device larger"
    # Further sizes and tied weights of a profile do not matter.
    plain = _problem(1200, options=Options(schedule="1f1b-flush", accumulate=2, recompute=False))
    tied, sizes = (TiedWeights(("w",), ("l0", "l3"), 50),), (Size(1, PROFILE.layers, PROFILE.tensors),)
    measured = replace(plain, profile=replace(PROFILE, minibatch=2, tied=tied, sizes=sizes))
    names = [[one.name for one in diagnose(problem, CUTS).oversized] for problem in (plain, measured)]
    assert names[0] == names[1] != []
    shared = Cluster("local", Device("chip", "cpu", 1200), (Level("server", 2, 1e3),))
    text = diagnose(Problem(PROFILE, shared, Options(recompute=False)), CUTS).text
    assert text.endswith("use a smaller minibatch or fewer workers, which share this machine's memory")


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_memory_named_is_enough_and_less_is_not(workers: int) -> None:
    problem = _problem(2300, workers)
    assert not _feasible(problem)
    enough = diagnose(problem, CUTS).enough
    assert _feasible(problem.within(variants.with_memory(problem.cluster, enough.memory_bytes)))
    assert not _feasible(problem.within(variants.with_memory(problem.cluster, int(enough.memory_bytes * 0.998))))
    assert 1 <= enough.stage <= len(enough.plan.stages)


def test_the_servers_named_are_enough_and_one_less_is_not() -> None:
    problems = (_problem(memory, 1) for memory in range(2300, 9000, 100))
    problem, growth = next(
        (one, found) for one in problems if not _feasible(one) and (found := diagnose(one, CUTS).growth)
    )
    assert growth.unit == "server"
    assert _feasible(problem.within(variants.grown_cluster(problem.cluster, growth.count)))
    fewer = problem.within(variants.grown_cluster(problem.cluster, growth.count - 1))
    assert growth.count - 1 == growth.now or not _feasible(fewer)


def test_constraints_that_exclude_everything_are_named() -> None:
    problem = _problem(10**6, 4, options=Options(stages=2, pins=(("l0", 2), ("l3", 1))))
    found = diagnose(problem, CUTS)
    assert found.relaxed == ("--pin",)
    pins = "'l3' is pinned to stage 1 and 'l0', which comes before it, to stage 2"
    assert f"no plan satisfies the constraints on 4 workers: {pins}; relax --pin" in found.text
    assert found.enough is None


def test_where_devices_differ_the_smallest_is_spoken_of() -> None:
    uniform = _problem(2300, 2, 2)
    sizes = (("small", 2300), ("large", 2400))
    machines = [Server(Device(name, "cuda", size), uniform.cluster.levels[0]) for name, size in sizes]
    problem = uniform.within(Cluster.of_servers("mixed", machines, uniform.cluster.levels[1:]))
    assert not _feasible(problem)
    found = diagnose(problem, CUTS)
    assert (found.uniform, found.capacity_bytes) == (False, 2300.0)
    factor = found.enough.memory_bytes / 2300
    assert _feasible(problem.within(variants.with_more_memory(problem.cluster, factor)))
    assert "2.25 KiB each (the smallest; others in proportion)" in found.text


@pytest.mark.parametrize("constraints", [{"stages": 3}, {"pins": (("l2", 3),)}, {"max_replicas": 1, "stages": 3}])
def test_too_few_minibatches_under_2bw_are_named_and_not_the_stages(constraints: dict[str, Any]) -> None:
    options = Options(schedule="2bw", accumulate=1, memory=False, **constraints)
    problem = _problem(1, workers=4, options=options)
    found = diagnose(problem, CUTS)
    now, enough = found.too_few
    assert now == 1
    assert found.text.endswith(f"one update has, which are 1; --batch {enough * problem.profile.minibatch} would do")
    assert "--stages" not in found.text
    assert not _feasible(replace(problem, options=replace(options, accumulate=enough - 1)))
    assert _feasible(replace(problem, options=replace(options, accumulate=enough)))
