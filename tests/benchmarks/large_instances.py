"""Instances for timing the planner: chains of any length."""

from __future__ import annotations

import random
from dataclasses import replace

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights

GB, GIB = 1e9, 2**30
RATES = ((100 * GB, 1e-6), (12.5 * GB, 2e-6), (6 * GB, 3e-6), (1.25 * GB, 20e-6))
"""Bandwidth in bytes/s and latency in seconds, by level."""


def chain(layers: int, seed: int = 0) -> Profile:
    """Layers in a row: 1.5 to 4.5 ms, 2 to 20 MB of parameters, 25 to 100 MB saved, 1 to 4 MB across."""
    rng = random.Random(seed)
    made = tuple(
        Layer(
            f"l{i}",
            rng.uniform(0.5, 1.5) * 1e-3,
            rng.uniform(1, 3) * 1e-3,
            int(rng.uniform(2e6, 20e6)),
            int(rng.uniform(25e6, 100e6)),
        )
        for i in range(layers)
    )
    tensors = tuple(
        Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), int(rng.uniform(1e6, 4e6)), 2_000_000) for i in range(layers - 1)
    )
    return Profile(layers=made, tensors=tensors, minibatch=1, optimizer_state_ratio=2.0)


def cluster(*counts: int, memory_gib: float = 80.0, level: int = 0) -> Cluster:
    """Equal devices joined by levels of so many components, innermost first; rates from `level` of `RATES` on."""
    levels = tuple(Level(f"level{i}", count, *RATES[level + i]) for i, count in enumerate(counts))
    return Cluster("benchmark", Device("device", "cuda", int(memory_gib * GIB)), levels)


KINDS = ("nothing", "sharding", "executor", "tied")
"""What `with_cost` can add to an instance."""
_EXECUTOR = ExecutorCosts(
    pass_s=120e-6,
    message_s=60e-6,
    message_byte_s=1e-10,
    version_byte_s=1e-12,
    worker_bytes=GIB // 2,
    allocator_share=0.05,
    activation_share=0.05,
)


def with_cost(problem: Problem, kind: str) -> Problem:
    """The problem with one more cost, one of `KINDS`.

    Under a flush the first and the last layer share weights, which may then be in several stages; otherwise the first
    two layers do, which must share a stage.
    """
    profile, cluster, options = problem.profile, problem.cluster, problem.options
    if kind == "sharding":
        options = replace(options, sharding=Sharding.OPTIMIZER)
    elif kind == "executor":
        cluster = replace(cluster, executor=_EXECUTOR)
    elif kind == "tied":
        first, other = profile.layers[0], profile.layers[-1 if options.flushes else 1]
        shared = min(first.parameter_bytes, other.parameter_bytes)
        profile = replace(profile, tied=(TiedWeights((f"{first.name}.weight",), (first.name, other.name), shared),))
    return Problem(profile, cluster, options)
