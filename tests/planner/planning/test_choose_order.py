"""The order of servers that differ: every order once, and the best one found."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from brute_force import best
from extents import slow_but_for
from instances import drawn, random_instance, unequal_instance

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.errors import InfeasibleError
from pipeplan.from_options.choose_order import choose_order, distinct_orders, in_order
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import Deadline

CUTS = 1000


def _cluster(speeds: list[float], *counts: int) -> Cluster:
    """One worker of each speed in a server of its own, joined by levels with these counts, innermost first."""
    servers = [Server(Device(f"d{speed}", "cpu", 1 << 30, speed), Level("server", 1, 0.0)) for speed in speeds]
    above = [Level(f"level{number}", count, 1e9) for number, count in enumerate(counts)]
    return Cluster.of_servers("drawn", servers, above)


def _all_orders(speeds: list[float], inner: int) -> set[tuple[float, ...]]:
    """The sequences of speeds that exchanges inside groups of `inner` servers, and of whole groups, lead to."""
    groups = [speeds[start : start + inner] for start in range(0, len(speeds), inner)]
    sequences = set()
    for permuted in itertools.permutations(groups):
        for inside in itertools.product(*(list(itertools.permutations(group)) for group in permuted)):
            sequences.add(tuple(itertools.chain.from_iterable(inside)))
    return sequences


@pytest.mark.parametrize(
    ("speeds", "inner"),
    [
        ([1.0, 2.0, 3.0], 3),
        ([1.0, 1.0, 2.0, 2.0, 2.0], 5),
        ([1.0, 2.0, 2.0, 1.0], 2),
        ([1.0, 2.0, 3.0, 4.0], 2),
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], 2),
    ],
)
def test_every_order_is_given_once(speeds: list[float], inner: int) -> None:
    counts = (inner,) if inner == len(speeds) else (inner, len(speeds) // inner)
    orders = list(distinct_orders(_cluster(speeds, *counts)))
    assert orders[0] == tuple(range(len(speeds)))
    assert all(sorted(order) == list(range(len(speeds))) for order in orders)
    sequences = [tuple(speeds[number] for number in order) for order in orders]
    assert len(sequences) == len(set(sequences))
    assert set(sequences) == _all_orders(speeds, inner)


def test_many_equal_servers_have_few_first_orders() -> None:
    cluster = _cluster([1.0] * 40 + [2.0] * 40 + [3.0] * 40, 120)
    first = list(itertools.islice(distinct_orders(cluster), 7))
    speeds = [[cluster.machines[number].device.speed for number in order] for order in first]
    grouped = [
        list(itertools.chain.from_iterable([s] * 40 for s in p)) for p in itertools.permutations([1.0, 2.0, 3.0])
    ]
    assert sorted(speeds[:6]) == sorted(grouped)
    assert speeds[6] not in grouped


def test_names_follow_their_servers() -> None:
    cluster = _cluster([1.0, 2.0], 2)
    named = replace(cluster, machines=(replace(cluster.machines[0], name="slow"), cluster.machines[1]))
    assert in_order(named, (0, 1)) is named
    assert [server.name for server in in_order(named, (1, 0)).machines] == ["server 1 of the cluster file", "slow"]


def test_a_uniform_cluster_has_one_order() -> None:
    _, problem = drawn(1, random_instance)
    assert problem.cluster.uniform
    assert choose_order(problem, CUTS) == (problem, [])


@pytest.mark.parametrize("seed", slow_but_for(range(6), range(12)))
def test_the_best_order_is_found(seed: int) -> None:
    instance, problem = drawn(seed, unequal_instance)
    inner = int(instance.levels[1][0])
    orders = list(itertools.permutations(range(len(instance.servers))))
    if len(instance.levels) > 2:  # two levels of two: only whole pairs, and the servers in them, change places
        orders = [order for order in orders if {order[0] // inner} == {number // inner for number in order[:inner]}]
    least = min(
        best(replace(instance, servers=tuple(instance.servers[number] for number in order))) for order in orders
    )
    if least == math.inf:
        if len(list(distinct_orders(problem.cluster))) > 1:
            with pytest.raises(InfeasibleError, match="no order of the servers"):
                choose_order(problem, CUTS)
        return
    chosen, choices = choose_order(problem, CUTS, simulates=False)
    if choices:
        assert choices[0].problem is chosen
        assert choices[0].step_time_s == pytest.approx(least, rel=1e-9)
    else:
        assert len({(server.device, server.inside, server.card) for server in problem.cluster.machines}) == 1


def test_the_order_of_the_file_does_not_matter() -> None:
    """Of two servers the slow one belongs where the smaller stage is, wherever the file lists it."""
    layers = tuple(Layer(f"l{number}", 1.0, 2.0, 0, 0) for number in range(4))
    tensors = tuple(Tensor(f"t{number}", f"l{number}", (f"l{number + 1}",), 10**6, 10**6) for number in range(3))
    heavy = Layer("l4", 4.0, 8.0, 0, 0)
    profile = Profile((*layers, heavy), (*tensors, Tensor("t3", "l3", ("l4",), 10, 10)), 1)
    step_times = []
    for speeds in ([1.0, 3.0], [3.0, 1.0]):
        problem = Problem(profile, _cluster(speeds, 2), Options(max_replicas=1, overlap=0.0))
        chosen, choices = choose_order(problem, CUTS)
        assert [server.device.speed for server in chosen.cluster.machines] == [1.0, 3.0]
        assert len(choices) == 2
        step_times.append(choices[0].step_time_s)
    assert step_times[0] == step_times[1]


def test_without_time_the_listed_order_stays() -> None:
    _, drawn_problem = drawn(3, unequal_instance)
    problem = replace(drawn_problem, cluster=_cluster([1.0, 2.0, 3.0], 3))
    chosen, choices = choose_order(problem, CUTS, Deadline.after(0.0))
    assert chosen is problem
    assert not any(choice.in_time for choice in choices)


def test_orders_are_compared_by_their_figures() -> None:
    """The figure of a plan is at least the time by the formulas, and orders are sorted by it."""
    for seed in range(40):
        _, problem = drawn(seed, unequal_instance)
        if len(list(distinct_orders(problem.cluster))) == 1 or problem.options.inference:
            continue
        try:
            _, choices = choose_order(problem, CUTS)
            _, by_formula = choose_order(problem, CUTS, simulates=False)
        except InfeasibleError:
            continue
        formula_of = {one.order: one.step_time_s for one in by_formula}
        later = [
            one
            for one in choices
            if one.step_time_s is not None and one.step_time_s > (formula_of[one.order] or 0) * 1.001
        ]
        if later:
            assert [one.step_time_s for one in choices[1:] if one.step_time_s] == sorted(
                one.step_time_s for one in choices[1:] if one.step_time_s
            )
            return
    pytest.fail("no drawn problem has a plan whose simulation is slower than the formulas")
