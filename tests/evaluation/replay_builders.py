"""Small plans to emulate, and the result of a replay whose figures are chosen by hand."""

from __future__ import annotations

from pathlib import Path

from replay_measure import ReplayedStage, ReplayResult
from replay_network import LinkUse, Scaling

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


FAST = ReplayedStage(1, 0.050, 0.02, 0.03, 0.0, 0.0, 0.05, 0.0)
STAGE = ReplayedStage(2, 0.200, 0.08, 0.12, 0.0, 0.0, 0.0, 0.0)
LINK = LinkUse("server 1", 1e9, "in", 5e7, 0.5, 5e7, 0.5)
REPLAYED = ReplayResult(
    "2-1", 0.1, 0.1, 0.12, 0.001, 100, Scaling(100, 3), (STAGE, FAST), (LINK,), 20.0, cores_busy=0.5
)
"""Two replicas that need 0.2 s each set the pace of 0.1 s; 0.12 s were measured."""
