"""Gains of other machines: the problem is solved again with one property of the cluster changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from pipeplan import alter
from pipeplan.cluster_data import Cluster
from pipeplan.cuts import Cuts
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.quick import best_plan


@dataclass(frozen=True)
class Change:
    """A change of the cluster."""

    name: str
    make: Callable[[], Cluster]


@dataclass(frozen=True)
class Effect:
    """The best plan after a change of the cluster."""

    name: str
    pace_s: float | None
    """Seconds per minibatch of the best plan after the change; None if there is no plan, or no such cluster."""
    gain: float | None
    """Speedup over the present best plan."""
    config: str = ""
    remark: str = ""


def changes(cluster: Cluster) -> Iterator[Change]:
    """Bandwidth, memory and speed, each doubled alone, and one more server (or worker)."""
    for index in reversed(alter.crossed(cluster)):
        name = f"links of level {cluster.levels[index].name} twice as fast"
        yield Change(name, partial(alter.with_faster_links, cluster, index, 2.0))
        for operation in alter.OPERATIONS:
            yield Change(f"  for {operation} alone", partial(alter.with_faster_links, cluster, index, 2.0, operation))
    more = cluster.levels[-1].count + 1
    yield Change(f"one more {alter.unit_of_growth(cluster)}", partial(alter.grown, cluster, more))
    yield Change("devices with twice the memory", partial(alter.with_more_memory, cluster, 2.0))
    yield Change("devices twice as fast", partial(alter.with_faster_devices, cluster, 2.0))


def effects(problem: Problem, cuts: Cuts, plan: Plan, pace_s: float) -> Iterator[Effect]:
    """The best plan after every change, compared with the present best plan and its pace.

    The cuts serve all changes, because they do not depend on the cluster.
    """
    for change in changes(problem.cluster):
        try:
            best = best_plan(problem.within(change.make()), cuts, plan)
        except InputError as error:
            yield Effect(change.name, None, None, remark=str(error))
            continue
        if best is None:
            yield Effect(change.name, None, None, remark="no plan")
            continue
        yield Effect(change.name, best.pace_s, pace_s / best.pace_s, best.plan.config)
