"""Why there is no plan: the figures named are enough, and less is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeplan.cluster_data import variants
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.planning.infeasibility import diagnose
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Size, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.solvers.dp import dynamic_program
from pipeplan.util.text import did_you_mean

CUTS = 2000


def _profile(saved: int = 1000, layers: int = 4) -> Profile:
    return Profile(
        layers=tuple(Layer(f"l{i}", 1.0, 2.0, 100 * (i + 1), saved) for i in range(layers)),
        tensors=tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), 10, 10) for i in range(layers - 1)),
        minibatch=1,
    )


def _problem(memory: int, workers: int = 2, servers: int = 1, options: Options | None = None) -> Problem:
    levels = (Level("server", workers, 1e3), Level("cluster", servers, 1e2))
    # Without recomputation, so that what is saved counts for every minibatch in flight.
    return Problem(
        _profile(), Cluster("small", Device("chip", "cuda", memory), levels), options or Options(recompute=False)
    )


def _feasible(problem: Problem) -> bool:
    return dynamic_program.is_feasible(problem, enumerate_cuts(problem, CUTS))


def test_a_layer_that_fits_nowhere_is_named_with_what_is_missing() -> None:
    found = diagnose(_problem(1200), CUTS)
    # The weights thrice (gradient, optimiser's state, one version) and what is saved.
    assert [(one.name, one.needs_bytes) for one in found.oversized] == [
        ("l3", 2200.0),
        ("l2", 1900.0),
        ("l1", 1600.0),
        ("l0", 1300.0),
    ]
    assert found.oversized[0].missing_bytes == 1000.0
    assert "layer 'l3' alone needs 2.15 KiB, 1000 B more than the 1.17 KiB of one chip" in found.text
    assert "(and 3 other layers more than it has)" in found.text
    assert found.growth is None, "no number of servers makes a device larger"


def test_further_sizes_and_tied_weights_of_a_profile_do_not_matter() -> None:
    plain = _problem(1200, options=Options(schedule="1f1b-flush", accumulate=2, recompute=False))
    tied = (TiedWeights(("w",), ("l0", "l3"), 50),)
    measured = replace(
        plain.profile, minibatch=2, tied=tied, sizes=(Size(1, plain.profile.layers, plain.profile.tensors),)
    )
    found = [diagnose(problem, CUTS).oversized for problem in (plain, replace(plain, profile=measured))]
    assert found[0]
    assert [one.name for one in found[0]] == [one.name for one in found[1]]


def test_workers_of_this_machine_are_told_to_be_fewer() -> None:
    shared = Cluster("local", Device("chip", "cpu", 1200), (Level("server", 2, 1e3),))
    text = diagnose(Problem(_profile(), shared, Options(recompute=False)), CUTS).text
    assert text.endswith("use a smaller minibatch or fewer workers, which share this machine's memory")
    assert diagnose(_problem(1200), CUTS).text.endswith("use a smaller minibatch or larger devices")


def test_of_many_names_some_are_listed() -> None:
    names = [f"layer{number}" for number in range(300)]
    assert did_you_mean("x", names) == f"there are: {', '.join(names[:24])} and 276 others"
    assert did_you_mean("x", names[:24]) == f"there are: {', '.join(names[:24])}"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_memory_named_is_enough_and_less_is_not(workers: int) -> None:
    problem = _problem(2300, workers)
    assert not _feasible(problem)
    enough = diagnose(problem, CUTS).enough
    assert enough is not None
    assert _feasible(problem.within(variants.with_memory(problem.cluster, enough.memory_bytes)))
    assert not _feasible(problem.within(variants.with_memory(problem.cluster, int(enough.memory_bytes * 0.998))))
    assert 1 <= enough.stage <= len(enough.plan.stages)


def test_the_servers_named_are_enough_and_one_less_is_not() -> None:
    problem = next(
        candidate
        for memory in range(2300, 9000, 100)
        for candidate in [_problem(memory, 1, 1)]
        if not _feasible(candidate) and diagnose(candidate, CUTS).growth is not None
    )
    growth = diagnose(problem, CUTS).growth
    assert growth is not None
    assert growth.unit == "server"
    assert _feasible(problem.within(variants.grown_cluster(problem.cluster, growth.count)))
    assert growth.count - 1 == growth.now or not _feasible(
        problem.within(variants.grown_cluster(problem.cluster, growth.count - 1))
    )


def test_constraints_that_exclude_everything_are_named() -> None:
    problem = _problem(10**6, 4, options=Options(stages=2, pins=(("l0", 2), ("l3", 1))))
    found = diagnose(problem, CUTS)
    assert found.relaxed == ("--pin",)
    pins = "'l3' is pinned to stage 1 and 'l0', which comes before it, to stage 2"
    assert f"no plan satisfies the constraints on 4 workers: {pins}; relax --pin" in found.text
    assert found.enough is None


def test_where_devices_differ_the_smallest_is_spoken_of() -> None:
    uniform = _problem(2300, 2, 2)
    inside = uniform.cluster.levels[0]
    machines = [
        Server(Device("small", "cuda", 2300), inside),
        Server(Device("large", "cuda", 2400), inside),
    ]
    problem = uniform.within(Cluster.of_servers("mixed", machines, uniform.cluster.levels[1:]))
    assert not _feasible(problem)
    found = diagnose(problem, CUTS)
    assert (found.uniform, found.capacity_bytes) == (False, 2300.0)
    assert found.enough is not None
    factor = found.enough.memory_bytes / 2300
    assert _feasible(problem.within(variants.with_more_memory(problem.cluster, factor)))
    assert "2.25 KiB each (the smallest; others in proportion)" in found.text


@pytest.mark.parametrize("constraints", [{"stages": 3}, {"pins": (("l2", 3),)}, {"max_replicas": 1, "stages": 3}])
def test_too_few_minibatches_under_2bw_are_named_and_not_the_stages(constraints: dict[str, Any]) -> None:
    options = Options(schedule="2bw", accumulate=1, memory=False, **constraints)
    problem = _problem(1, workers=4, options=options)
    found = diagnose(problem, CUTS)
    assert found.too_few is not None
    now, enough = found.too_few
    assert now == 1
    assert found.text.endswith(f"one update has, which are 1; --batch {enough * problem.profile.minibatch} would do")
    assert "--stages" not in found.text
    assert not _feasible(replace(problem, options=replace(options, accumulate=enough - 1)))
    assert _feasible(replace(problem, options=replace(options, accumulate=enough)))
