"""What another machine would give: the problem solved again with one thing changed."""

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
    """One thing that might be different."""

    name: str
    make: Callable[[], Cluster]


@dataclass(frozen=True)
class Effect:
    """What a change gives."""

    name: str
    pace_s: float | None
    """Of the best plan then, seconds per minibatch; None where there is none, or no such cluster."""
    gain: float | None
    """How many times faster than now."""
    config: str = ""
    remark: str = ""


def changes(cluster: Cluster) -> Iterator[Change]:
    """Links, machines, memory and speed, each doubled alone, and one more server (or worker)."""
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
    """The best plan after every change, compared with the best now and its pace; cuts do not depend on the cluster."""
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
