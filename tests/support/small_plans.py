"""A problem of two layers, solved, under whatever names a test gives its parts."""

from __future__ import annotations

from functools import cache

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

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
