"""Thousands of servers have as many spaces of plans, and the time that is given holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.links import Links
from pipeplan.cost.formulas import ring_allreduce_time
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import dynamic_program, spaces
from pipeplan.solvers.dp.pipeline_searches import PipelineSearches
from pipeplan.solvers.plan_space import plan_spaces

PROFILE = Profile(
    (Layer("a", 1.0, 2.0, 100, 10), Layer("b", 0.5, 1.0, 10, 4)), (Tensor("x", "a", ("b",), 8, 8),), minibatch=8
)


def _cluster(servers: int) -> Cluster:
    levels = (Level("server", 2, 1e9), Level("cluster", servers, 1e8, 1e-5, 0.6))
    return Cluster("many", Device("V100", "cuda", 1 << 30), levels)


@pytest.mark.parametrize("schedule", ["1f1b-stashing", "1f1b-flush"])
def test_what_there_is_no_time_for_is_left_out_with_its_bound(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = 8 if schedule == "1f1b-flush" else None
    problem = Problem(PROFILE, _cluster(3000), Options(stages=2, schedule=schedule, accumulate=accumulate))
    searched, best = [], PipelineSearches.best

    def counted(self: PipelineSearches) -> Any:
        searched.append(self)
        return best(self)

    monkeypatch.setattr(PipelineSearches, "best", counted)
    found = dynamic_program.solve(problem, enumerate_cuts(problem, 100), 0.0)
    assert len(searched) <= spaces.MOST_UNTIMED
    assert found.bound_s <= min(space.floor(problem) for space in plan_spaces(problem))


@pytest.mark.parametrize("unused", [(), (0,), (1,)])
def test_the_ring_of_copies_runs_over_the_links_between_all_its_workers(unused: tuple[int, ...]) -> None:
    problem = Problem(PROFILE, _cluster(5), Options())
    spaces = [replace(space, unused=frozenset(unused)) for space in plan_spaces(problem) if space.copies in (2, 3, 5)]
    assert spaces
    for space in spaces:
        workers = space.workers(problem.cluster)
        size = len(workers) // space.copies
        used = [worker for place, worker in enumerate(workers) if place % size not in unused]
        rate = Links.of(problem.cluster).allreduce_among(used)
        assert space.synchronisation(problem) == ring_allreduce_time(space.copies, 110, *rate) / space.copies
