"""The simplest plan within 3% of the fastest is taken, and the kinds have an order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.figure import TOLERANCE, simplest_of
from pipeplan.problem.options import Sharding


@dataclass(frozen=True)
class _One:
    plan: Plan
    sample_s: float
    sharding: Sharding = Sharding.NONE
    cluster: Cluster = field(default_factory=lambda: pipeplan.cluster("C"))


def _plan(*counts: int, first: int = 0) -> Plan:
    stages = []
    for count in counts:
        stages.append(Stage((f"layer{first}",), tuple(range(first, first + count)), 1, 1))
        first += count
    return Plan(tuple(stages), schedule="1f1b-flush", accumulate=4)


PARALLEL, UNIFORM, UNEQUAL = _plan(4), _plan(2, 2), _plan(3, 1)


def test_the_order_of_the_kinds() -> None:
    divided = [_One(PARALLEL, 1.021, kind) for kind in (Sharding.FULL, Sharding.OPTIMIZER)]
    found = [_One(UNEQUAL, 1.0), _One(UNIFORM, 1.02), *divided, _One(PARALLEL, 1.029)]
    for number in range(len(found), 0, -1):
        assert simplest_of(found[:number]) is found[number - 1]


def test_a_plan_beyond_the_tolerance_is_not_taken() -> None:
    fast, slow = _One(UNEQUAL, 1.0), _One(PARALLEL, 1.0 + TOLERANCE + 1e-6)
    assert simplest_of([slow, fast]) is fast


def test_fewer_workers_and_fewer_stages_are_simpler() -> None:
    assert simplest_of([_One(_plan(4), 1.0), _One(_plan(2), 1.01)]).plan.busy == 2
    assert len(simplest_of([_One(_plan(1, 1, 2), 1.0), _One(UNEQUAL, 1.01)]).plan.stages) == 2


def test_idle_workers_come_last_where_that_costs_little() -> None:
    late = _One(_plan(2, first=2), 1.0)
    assert simplest_of([late, _One(_plan(2), 1.001)]).plan.stages[0].workers == (0, 1)


def test_replicas_that_are_equal_on_each_kind_of_device_are_uniform() -> None:
    fast, slow = (Device(name, "cuda", 10**9, speed=speed) for name, speed in (("fast", 1.0), ("slow", 0.5)))
    servers = [Server(device, Level("server", 4, 1e9)) for device in (slow, fast)]
    mixed = Cluster.of_servers("mixed", servers, (Level("cluster", 2, 1e9),))
    uniform, unequal = _One(_plan(2, 2, 4), 1.02, cluster=mixed), _One(_plan(1, 3, 4), 1.0, cluster=mixed)
    assert simplest_of([unequal, uniform]) is uniform
    across = _One(_plan(2, 4, 2), 1.02, cluster=mixed)
    assert simplest_of([unequal, across]) is unequal, "a stage on two kinds of device"
