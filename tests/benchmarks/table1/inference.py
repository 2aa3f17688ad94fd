"""Inference of a small network on 20 CPUs, pipelined and data parallel, as a course project published it.

The network is that of github.com/euske/nn1 (mnist.c): five layers, 10,000 images, naive loops. The
layers' shares of the sequential time are not published. They follow from the number of multiplications, all taken to
last equally long.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import plain_data_parallel
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from table1.configurations import Configurations

SOURCE = "slides of a course project on pipelined and data-parallel CNN inference over MPI on CPUs"
IMAGES, CPUS = 10_000, 20
PIPELINED = 43.715269, 5.89032, 7.42
"""Published seconds in sequence, seconds on 20 CPUs, and speed-up."""
PARALLEL = 45.51055, 2.647105, 17.19
NUMBER = 8
"""Bytes of a number: the network computes in doubles."""
BANDWIDTH, LATENCY = 1e9, 5e-6
"""Bytes/s and seconds of messages between processes. They are not published, and no result depends on them."""
COUNT = 4
"""Bytes of the number of right answers, which is reduced at the end."""


@dataclass(frozen=True)
class CountedLayer:
    """A layer, its multiplications per image, and the count of its output numbers."""

    name: str
    products: int
    outputs: int


LAYERS = (
    CountedLayer("conv1", 14 * 14 * 16 * 3 * 3 * 1, 14 * 14 * 16),
    CountedLayer("conv2", 7 * 7 * 32 * 3 * 3 * 16, 7 * 7 * 32),
    CountedLayer("fc1", 7 * 7 * 32 * 200, 200),
    CountedLayer("fc2", 200 * 200, 200),
    CountedLayer("output", 200 * 10, 10),
)
"""Convolutions have 3×3 filters and stride 2."""


@dataclass(frozen=True)
class Inference:
    """One way to use the CPUs: its prediction, and the published speed-up where there is one."""

    name: str
    config: str
    seconds: float
    """Seconds for all images, with the reduction at the end."""
    speedup: float
    bound: str
    published: float | None = None
    """Published speed-up."""

    @property
    def error(self) -> float | None:
        """Predicted over published speed-up, less 1."""
        return None if self.published is None else self.speedup / self.published - 1


def shares() -> dict[str, float]:
    """Each layer's share of the sequential time, by its multiplications."""
    total = sum(layer.products for layer in LAYERS)
    return {layer.name: layer.products / total for layer in LAYERS}


def reduce_s(processes: int) -> float:
    """Seconds of the reduction at the end: ⌈log2 P⌉ messages, one after the other."""
    return math.ceil(math.log2(processes)) * (LATENCY + COUNT / BANDWIDTH)


def problem(sequential_s: float = PIPELINED[0]) -> Problem:
    """Inference of one image at a time, with layer times by their shares of a sequential run."""
    layers = tuple(Layer(name, sequential_s / IMAGES * share, 0.0, 0, 0) for name, share in shares().items())
    tensors = tuple(
        Tensor(one.name, one.name, (other.name,), one.outputs * NUMBER, 0) for one, other in itertools.pairwise(LAYERS)
    )
    cluster = Cluster("20 CPUs", Device("CPU", "cpu", 2**30), (Level("server", CPUS, BANDWIDTH, LATENCY),))
    return Problem(Profile(layers, tensors, 1, model_name="mnist"), cluster, Options(inference=True, overlap=0.0))


def cyclic() -> Plan:
    """One layer per process, in four copies: process p has layer p mod 5."""
    copies = CPUS // len(LAYERS)
    stages = tuple(
        Stage((layer.name,), tuple(range(index, CPUS, len(LAYERS))), 1, 1) for index, layer in enumerate(LAYERS)
    )
    return Plan(stages, copies, inference=True)


def predict() -> list[Inference]:
    """The two published ways, the best with a stage for every layer, and the best of all."""
    inference = problem()
    ways = [
        _scored("pipelined, cyclic", cyclic(), inference, PIPELINED[2]),
        _scored("data parallel", plain_data_parallel(inference, CPUS), inference, PARALLEL[2]),
    ]
    straight = Configurations.of(inference, enumerate_cuts(inference, 100))
    counts = balanced(tuple(shares().values()), CPUS)
    ways.append(_scored("a stage a layer", straight.best(counts)[0], inference, None))
    best = solve(inference, Settings(solver="dp", certify=False))
    ways.append(_scored("pipeplan's best", best.plan, inference, None))
    return ways


def balanced(work: tuple[float, ...], workers: int) -> tuple[int, ...]:
    """Replica counts that minimise the time of the slowest stage: each further worker goes to the slowest stage.

    This is exact, because a stage gets a further worker only while no plan without it could be faster.
    """
    counts = [1] * len(work)
    for _ in range(workers - len(work)):
        slowest = max(range(len(work)), key=lambda index: work[index] / counts[index])
        counts[slowest] += 1
    return tuple(counts)


def _scored(name: str, plan: Plan, problem: Problem, published: float | None) -> Inference:
    score = evaluate(plan, problem)
    one = sum(unit.forward_s for unit in problem.units)
    seconds = one + (IMAGES - 1) * score.pace_s + reduce_s(plan.busy)
    return Inference(name, plan.config, seconds, one * IMAGES / seconds, score.bound, published)
