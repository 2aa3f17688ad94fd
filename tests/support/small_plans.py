"""A problem of two layers, solved, under whatever names a test gives its parts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.launchers import LAUNCHERS
from pipeplan.rendering.plan_folder import write_launch_file, write_plan

NASTY = "a b\n'\"; touch pwned; $(touch pwned) `touch pwned` \\ \x1b[31m é #"


@cache
def outcome(model: str = "small", layer: str = "a", cluster: str = "test") -> Outcome:
    """A solved problem of two layers on three workers, with the given names."""
    profile = Profile(
        layers=(Layer(layer, 2.0, 4.0, 50, 5), Layer("b", 1.0, 2.0, 20, 7)),
        tensors=(Tensor("x", layer, ("b",), 4, 4),),
        minibatch=8,
        model_ref=model,
        model_name=model,
        graph_hash="sha256:0",
    )
    made = Cluster(cluster, Device("d", "cpu", 10_000), (Level("server", 3, 100.0),))
    return solve(Problem(profile, made), Settings())


def servers_of(workers: int, servers: int, kind: str = "cpu") -> Problem:
    """The same problem on so many servers of so many workers each, joined where there are several."""
    small = outcome().problem
    levels = (Level("server", workers, 100.0), Level("cluster", servers, 10.0))[: 1 + (servers > 1)]
    device = replace(small.cluster.device, kind=kind)
    return Problem(small.profile, Cluster("test", device, levels))


def write_with_launcher(problem: Problem, folder: Path, kind: str) -> Path:
    """Write the plan of a problem and its file of a kind of launcher. Returns that file."""
    write_plan(solve(problem, Settings("dp", simulate=False)), folder, force=True)
    return write_launch_file(folder, LAUNCHERS[kind], {}, force=True)


def shaped(replicas: tuple[int, ...], depths: tuple[int, ...], schedule: str, accumulate: int | None = None) -> Plan:
    """A plan whose stages have so many replicas and minibatches in flight."""
    ends = list(itertools.accumulate(replicas, initial=0))
    runs = [tuple(range(*run)) for run in itertools.pairwise(ends)]
    stages = tuple(Stage(("l",), run, depth, 1) for run, depth in zip(runs, depths, strict=True))
    return Plan(stages, schedule=schedule, accumulate=accumulate)
