"""The reserve of a device's memory: a device with a reserve is planned for as one with only the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from long_chains import chain

import pipeplan
from pipeplan.cluster_data.cluster import MEMORY_RESERVE, Cluster, Device, Level, Server
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.profile_data.layers import Layer

PROFILE = chain([Layer(f"l{i}", 1.0, 2.0, size, size) for i, size in enumerate((100, 300, 250, 200))], 10)
WHOLE, REST, RESERVE = 3200, 2400, 0.25
"""Bytes of a device, with and without its reserve: the plans of the two differ."""


def _cluster(memory: int, reserve: float, *, differ: bool) -> Cluster:
    device = Device("chip", "cuda", memory, memory_reserve=reserve)
    inside, above = Level("server", 2, 1e3), Level("cluster", 2, 1e2)
    if not differ:
        return Cluster("small", device, (inside, above))
    faster = replace(device, name="fast", speed=2.0)
    return Cluster.of_servers("mixed", [Server(device, inside), Server(faster, inside)], [above])


def _solved(cluster: Cluster, solver: str) -> Outcome:
    settings = Settings(solver=solver, certify=False, simulate=False, time_limit_s=None)
    return pipeplan.solve(PROFILE, cluster, settings=settings, schedule="1f1b-flush", batch=8, microbatch=1)


@pytest.mark.parametrize("solver", ["dp", "ilp"])
@pytest.mark.parametrize("differ", [False, True])
def test_a_reserve_leaves_the_rest_to_plan_with(solver: str, differ: bool) -> None:
    reserved, smaller, whole = (
        _solved(_cluster(size, reserve, differ=differ), solver)
        for size, reserve in ((WHOLE, RESERVE), (REST, 0.0), (WHOLE, 0.0))
    )
    assert reserved.plan == smaller.plan != whole.plan
    assert {stage.capacity_bytes for stage in reserved.evaluation.stages} == {REST}


def test_the_usual_reserve_and_a_layer_that_needs_it() -> None:
    for cluster in (pipeplan.cluster("A"), pipeplan.cluster("local")):
        assert cluster.device.memory_reserve == MEMORY_RESERVE
        assert cluster.memory_of([0]) == int(cluster.device.memory_bytes * 0.95)
    with pytest.raises(pipeplan.InfeasibleError, match="more than the 768 B of one chip"):
        _solved(_cluster(1024, RESERVE, differ=False), "dp")
