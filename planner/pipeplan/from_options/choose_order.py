"""Finds the best order of the servers of a heterogeneous cluster.

A plan puts its stages on workers of increasing index, and workers are numbered in the order of their servers. If
servers differ, another order gives another space of plans. Equal servers, and equal components of a level, need not be
exchanged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.figure import TOLERANCE, Figure, figured
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import NO_DEADLINE, Deadline

MOST_ORDERS = 120
"""Largest number of orders that are tried, beginning with the listed order: all orders of five different servers."""


@dataclass(frozen=True)
class OrderChoice:
    """The best plan of one order of the servers."""

    problem: Problem
    order: tuple[int, ...]
    """For every server in this order, its index in the cluster as listed."""
    step_time_s: float | None
    """The step time of the best plan, in seconds per minibatch; None if no plan fits. The time is simulated, or from
    the formulas if the best plan of some order was not simulated."""
    config: str
    in_time: bool = True
    """Whether there was enough time to find a plan, or to show that there is none."""


def choose_order(
    problem: Problem, maximum_cuts: int, deadline: Deadline = NO_DEADLINE, *, simulates: bool = True
) -> tuple[Problem, list[OrderChoice]]:
    """The problem with its servers in the best order, and the results of all orders that were tried, best first.

    The listed order is kept if it is within the tolerance of the fastest order, else the fastest order is taken.
    The orders share the time until the deadline. A uniform cluster has one order, and the list is then empty. Raises
    `InfeasibleError` if no order has a plan.
    """
    orders = list(itertools.islice(distinct_orders(problem.cluster), MOST_ORDERS))
    if len(orders) == 1:
        return problem, []
    choices, figures = [], list[Figure]()
    for number, order in enumerate(orders):
        ordered = replace(problem, cluster=in_order(problem.cluster, order))
        ends = deadline.share(1 / (len(orders) - number))
        best, in_time = best_in_time(ordered, maximum_cuts, ends)
        if best is not None:
            found = figured(best.plan, evaluate(best.plan, ordered), ordered, ends, simulates=simulates)
            figures.append(found.figure)
        step_time, config = (None, "") if best is None else (figures[-1].step_s, best.plan.config)
        choices.append(OrderChoice(ordered, order, step_time, config, in_time))
    if any(figure.simulated_s is None for figure in figures):
        formulas = iter(figures)
        choices = [
            one if one.step_time_s is None else replace(one, step_time_s=next(formulas).formula_s) for one in choices
        ]
    if all(choice.step_time_s is None for choice in choices):
        if all(choice.in_time for choice in choices):
            raise InfeasibleError(f"no order of the servers has a plan that fits: tried {len(choices)}")
        return problem, choices
    least = min(choice.step_time_s for choice in choices if choice.step_time_s is not None)
    listed = choices[0]
    if listed.step_time_s is not None and listed.step_time_s <= least * (1 + TOLERANCE):
        best_choice = listed
    else:
        best_choice = next(c for c in choices if c.step_time_s is not None and c.step_time_s <= least * (1 + 1e-9))
    choices.sort(
        key=lambda choice: (choice is not best_choice, math.inf if choice.step_time_s is None else choice.step_time_s)
    )
    return best_choice.problem, choices


def in_order(cluster: Cluster, order: Sequence[int]) -> Cluster:
    """The cluster with its servers in this order, given by their indices.

    A server without a name is named after its old index if the index changes. Devices of a server get no such names."""
    if list(order) == list(range(len(order))):
        return cluster
    size = math.prod(level.count for level in cluster.levels[1 : cluster.server_level])
    machines = []
    for place, number in enumerate(order):
        machine, server = cluster.machines[number], number // size
        moved = server != place // size and not machine.name
        machines.append(replace(machine, name=f"server {server} of the cluster file") if moved else machine)
    return Cluster.of_servers(cluster.name, machines, cluster.levels[1:], cluster.executor)


def distinct_orders(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """The distinct orders of the servers that planning can distinguish, as indices of servers.

    Only components inside the same component are exchanged, so that every level keeps its members. Orders that only
    exchange equal components are given once. The listed order comes first, then orders in which equal components are
    adjacent, then all others.
    """
    if cluster.uniform:
        yield ()
        return
    whole = _component(cluster, range(len(cluster.machines)), len(cluster.levels) - 1)
    listed = tuple(range(len(cluster.machines)))
    yield listed
    seen = {listed}
    for order in itertools.chain(_orders(whole, grouped=True), _orders(whole, grouped=False)):
        if order not in seen:
            seen.add(order)
            yield order


@dataclass(frozen=True)
class _Component:
    """A server, or the components that a level joins."""

    kind: tuple[object, ...]
    """A key that is equal for components that differ only in the order inside."""
    servers: tuple[int, ...]
    parts: tuple[_Component, ...] = ()


def _component(cluster: Cluster, servers: Sequence[int], level: int) -> _Component:
    """The component `level` levels above the server that contains these servers."""
    if level == 0:
        machine = cluster.machines[servers[0]]
        first = next(number for number, other in enumerate(cluster.machines) if other.same_as(machine))
        return _Component((first,), tuple(servers))
    size = len(servers) // cluster.levels[level].count
    slices = [servers[start : start + size] for start in range(0, len(servers), size)]
    parts = tuple(_component(cluster, part, level - 1) for part in slices)
    kind: tuple[object, ...] = tuple(sorted((part.kind for part in parts), key=repr))
    return _Component(kind, tuple(servers), parts)


def _orders(component: _Component, *, grouped: bool) -> Iterator[tuple[int, ...]]:
    """The distinct orders of the servers of a component; with `grouped`, equal parts are adjacent."""
    if not component.parts:
        yield component.servers
        return
    for arranged in _arrangements(component.parts, grouped=grouped):
        yield from _inner_orders(arranged, grouped=grouped)


def _inner_orders(parts: Sequence[_Component], *, grouped: bool) -> Iterator[tuple[int, ...]]:
    """The orders of all servers. The order of the parts stays fixed."""
    if not parts:
        yield ()
        return
    for first in _orders(parts[0], grouped=grouped):
        for rest in _inner_orders(parts[1:], grouped=grouped):
            yield first + rest


def _arrangements(parts: Sequence[_Component], *, grouped: bool) -> Iterator[list[_Component]]:
    """The permutations of the parts that differ in kind at some position.

    The given order comes first, unless `grouped`.
    """
    kinds = {part.kind: [other for other in parts if other.kind == part.kind] for part in parts}
    if grouped:
        for permuted in itertools.permutations(kinds.values()):
            yield list(itertools.chain.from_iterable(permuted))
        return
    if not parts:
        yield []
    for alike in kinds.values():
        remaining = [part for part in parts if part is not alike[0]]
        for rest in _arrangements(remaining, grouped=False):
            yield [alike[0], *rest]
