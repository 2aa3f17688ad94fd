"""Small plans to emulate."""

from __future__ import annotations

from pathlib import Path

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_folder

PROFILE = Profile(
    layers=(Layer("a", 0.020, 0.040, 1000, 4_000_000), Layer("b", 0.010, 0.020, 500, 8_000_000)),
    tensors=(Tensor("x", "a", ("b",), 2_000_000, 1_000_000),),
    minibatch=4,
    model_name="small",
)
GIGABIT = 125e6
"""Bytes/s."""


def cluster(*levels: tuple[str, int, float], memory: int = 2**34) -> Cluster:
    """(name, count, bytes/s), innermost first."""
    return Cluster("test", Device("d", "cuda", memory), tuple(Level(*level) for level in levels))


def two_servers(each: int = 1) -> Cluster:
    """Joined by 10 Gbit/s."""
    return cluster(("server", each, 12e9), ("cluster", 2, 10 * GIGABIT))


def write(folder: Path, on: Cluster, **options: object) -> Path:
    """A plan folder; its path."""
    problem = Problem(PROFILE, on, Options(**options))  # type: ignore[arg-type]
    plan_folder.write_plan(solve(problem, Settings(solver="dp")), folder)
    return folder
