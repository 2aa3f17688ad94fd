"""The rule by which a plan is taken: the simplest one within 3% of the fastest, by the figure.

Data parallelism is simplest: plain, then with a divided optimiser, then with divided weights. A uniform pipeline, which
has the same number of replicas in every stage, or in all stages on one kind of device, is simpler than one of unequal
replicas. Of two plans of one kind the
one with fewer busy workers is simpler, then the one with fewer stages, then the one whose stages lie in fewer servers,
then the one whose idle workers come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from pipeplan.cluster_data.cluster import Cluster, Device
from pipeplan.cost.stage_times import grid_shape_of
from pipeplan.plan.plan import Plan
from pipeplan.problem.options import Sharding

TOLERANCE = 0.03
"""Relative. A plan that is simpler, or has newer gradients, is taken if it is at most this much slower than another."""


class Comparable(Protocol):
    """A plan on a cluster, with a figure by which it is compared."""

    @property
    def plan(self) -> Plan: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def sample_s(self) -> float: ...
    @property
    def sharding(self) -> Sharding: ...


Some = TypeVar("Some", bound=Comparable)


def simplest_of(found: Iterable[Some]) -> Some:
    """The simplest of the plans within the tolerance of the fastest one. There must be at least one."""
    plans: Sequence[Some] = list(found)
    limit_s = min(one.sample_s for one in plans) * (1 + TOLERANCE)
    return min((one for one in plans if one.sample_s <= limit_s), key=_effort)


def _effort(one: Comparable) -> tuple[int, int, int, int, int, float]:
    """A key that is less for simpler plans, and for faster ones of equal simplicity."""
    plan = one.plan
    servers = sum(len({one.cluster.server_of(worker) for worker in stage.workers}) for stage in plan.stages)
    last = max(worker for stage in plan.stages for worker in stage.workers)
    return _rank(one), plan.busy, len(plan.stages), servers, last, one.sample_s


def _rank(one: Comparable) -> int:
    if len(one.plan.stages) == 1:
        return 2 if one.sharding.divides_weights else int(one.sharding == Sharding.OPTIMIZER)
    return 3 if grid_shape_of(one.plan, one.cluster) or _uniform_by_device(one.plan, one.cluster) else 4


def _uniform_by_device(plan: Plan, cluster: Cluster) -> bool:
    """Whether devices differ, and all stages on devices of one kind have the same number of replicas."""
    replicas: dict[Device, set[int]] = {}
    for stage in plan.stages:
        devices = {cluster.devices[worker] for worker in stage.workers}
        if len(devices) > 1 or (plan.accumulate or 0) % stage.replicas:
            return False
        replicas.setdefault(devices.pop(), set()).add(stage.replicas)
    different = len(set(cluster.devices)) > 1
    return different and plan.copies == 1 and all(len(counts) == 1 for counts in replicas.values())
