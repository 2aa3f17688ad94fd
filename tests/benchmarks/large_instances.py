"""Instances for timing the planner: chains of any length, and graphs that branch as well-known models do."""

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


class _Builder:
    """A graph of layers, each read by those that name it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.layers: list[Layer] = []
        self.readers: dict[str, list[str]] = {}

    def add(self, *sources: str, light: bool = False) -> str:
        """A layer that reads some others; a light one (a norm, an activation) takes little time and has no weights."""
        name = f"l{len(self.layers)}"
        scale = 0.05 if light else 1.0
        forward = self.rng.uniform(0.2, 1.0) * 1e-3 * scale
        weights = 0 if light else int(self.rng.uniform(0.3e6, 12e6))
        self.layers.append(Layer(name, forward, 2 * forward, weights, int(self.rng.uniform(1e6, 10e6))))
        self.readers[name] = []
        for source in sources:
            self.readers[source].append(name)
        return name

    def run(self, source: str, convolutions: int) -> str:
        """Convolution, norm, activation, so many times."""
        for _ in range(convolutions):
            source = self.add(self.add(self.add(source), light=True), light=True)
        return source

    def profile(self) -> Profile:
        """All of it, each output between 1 and 8 MB."""
        tensors = tuple(
            Tensor(f"t{name}", name, tuple(readers), size, size)
            for name, readers in self.readers.items()
            if readers and (size := int(self.rng.uniform(1e6, 8e6)))
        )
        return Profile(layers=tuple(self.layers), tensors=tensors, minibatch=1)


def inception(seed: int = 0) -> Profile:
    """The layer graph of Inception-v3 (Szegedy et al., 2016): 11 blocks of up to 4 branches, some split again.

    Times, sizes and weights are drawn; the shape of the graph is what makes it hard.
    """
    graph = _Builder(seed)
    at = graph.run(graph.run(graph.add(), 5), 1)
    for _ in range(3):
        at = graph.add(graph.run(at, 1), graph.run(at, 2), graph.run(at, 3), graph.run(graph.add(at), 1))
    at = graph.add(graph.run(at, 1), graph.run(at, 3), graph.add(at))
    for _ in range(4):
        at = graph.add(graph.run(at, 1), graph.run(at, 3), graph.run(at, 5), graph.run(graph.add(at), 1))
    at = graph.add(graph.run(at, 2), graph.run(at, 4), graph.add(at))
    for _ in range(2):
        split, deep = graph.run(at, 1), graph.run(at, 2)
        ends = [graph.run(split, 1), graph.run(split, 1), graph.run(deep, 1), graph.run(deep, 1)]
        at = graph.add(graph.run(at, 1), *ends, graph.run(graph.add(at), 1))
    graph.run(at, 1)
    return graph.profile()


def nasnet(cells: int = 18, seed: int = 0) -> Profile:
    """Cells of five blocks that read the two cells before (Zoph et al., 2018): more cuts than can be listed."""
    graph = _Builder(seed)
    before, last = graph.add(), graph.add()
    before, last = last, graph.add(last)
    for _ in range(cells):
        blocks = []
        for _ in range(5):
            left, right = graph.rng.choice([before, last]), graph.rng.choice([before, last])
            blocks.append(graph.add(graph.run(left, 2), graph.run(right, 2)))
        before, last = last, graph.add(*blocks)
    return graph.profile()
