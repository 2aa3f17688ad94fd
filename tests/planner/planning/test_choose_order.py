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


def test_every_order_is_given_once() -> None:
    for speeds, inner in (
        ([1.0, 2.0, 3.0], 3),
        ([1.0, 1.0, 2.0, 2.0, 2.0], 5),
        ([1.0, 2.0, 2.0, 1.0], 2),
        ([1.0, 2.0, 3.0, 4.0], 2),
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], 2),
    ):
        counts = (inner,) if inner == len(speeds) else (inner, len(speeds) // inner)
        orders = list(distinct_orders(_cluster(speeds, *counts)))
        assert orders[0] == tuple(range(len(speeds)))
        assert all(sorted(order) == list(range(len(speeds))) for order in orders)
        sequences = [tuple(speeds[number] for number in order) for order in orders]
        assert len(sequences) == len(set(sequences))
        assert set(sequences) == _all_orders(speeds, inner)


def test_names_follow_their_servers() -> None:
    cluster = _cluster([1.0, 2.0], 2)
    named = replace(cluster, machines=(replace(cluster.machines[0], name="slow"), cluster.machines[1]))
    assert in_order(named, (0, 1)) is named
    assert [server.name for server in in_order(named, (1, 0)).machines] == ["server 1 of the cluster file", "slow"]


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
    several = len(list(distinct_orders(problem.cluster))) > 1
    if least == math.inf and several:
        with pytest.raises(InfeasibleError, match="no order of the servers"):
            choose_order(problem, CUTS)
    elif least < math.inf:
        chosen, choices = choose_order(problem, CUTS, simulates=False)
        assert bool(choices) is several
        if choices:
            assert choices[0].problem is chosen
            assert choices[0].step_time_s == pytest.approx(least, rel=1e-9)
            # Of all orders in which the file may list the servers the same is found.
            backwards = in_order(problem.cluster, tuple(reversed(range(len(problem.cluster.machines)))))
            _, others = choose_order(problem.within(backwards), CUTS, simulates=False)
            assert others[0].step_time_s == pytest.approx(least, rel=1e-9)


def test_without_time_or_with_equal_servers_the_listed_order_stays() -> None:
    _, uniform = drawn(1, random_instance)
    assert uniform.cluster.uniform
    assert choose_order(uniform, CUTS) == (uniform, [])
    problem = drawn(3, unequal_instance)[1].within(_cluster([1.0, 2.0, 3.0], 3))
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
        figures = [(one.step_time_s, formula_of[one.order] or 0) for one in choices if one.step_time_s]
        if any(figure_s > formula_s * 1.001 for figure_s, formula_s in figures):
            step_times = [one.step_time_s for one in choices[1:] if one.step_time_s]
            assert step_times == sorted(step_times)
            return
    pytest.fail("no drawn problem has a plan whose simulation is slower than the formulas")
