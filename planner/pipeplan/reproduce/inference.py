"""Inference of a small network on 20 CPUs, pipelined and data parallel, as a course project published it.

The network is that of github.com/euske/nn1 (mnist.c): five layers, 10,000 images, naive loops. What each layer takes of
the sequential time is not published: multiplications are counted, and each is taken to take equally long.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from pipeplan.cluster_data import Cluster, Device, Level
from pipeplan.cuts import enumerate_cuts
from pipeplan.evaluate import evaluate
from pipeplan.plan import Plan, Stage
from pipeplan.problem import Options, Problem
from pipeplan.profile_data import Layer, Profile, Tensor
from pipeplan.reproduce.configurations import Configurations
from pipeplan.solving import Settings, solve
from pipeplan.stages import one_stage

SOURCE = "slides of a course project on pipelined and data-parallel CNN inference over MPI on CPUs"
IMAGES, CPUS = 10_000, 20
PIPELINED = 43.715269, 5.89032, 7.42
"""Published: seconds in sequence, seconds on 20 CPUs, speed-up."""
PARALLEL = 45.51055, 2.647105, 17.19
NUMBER = 8
"""Bytes: the network computes in doubles."""
BANDWIDTH, LATENCY = 1e9, 5e-6
"""Of messages between processes: not published. Copies through shared memory are faster; nothing here depends on it."""
COUNT = 4
"""Bytes of what is reduced in the end: the number of right answers."""


@dataclass(frozen=True)
class Counted:
    """A layer, the multiplications that one image takes in it, and the numbers that it hands on."""

    name: str
    products: int
    outputs: int


LAYERS = (
    Counted("conv1", 14 * 14 * 16 * 3 * 3 * 1, 14 * 14 * 16),
    Counted("conv2", 7 * 7 * 32 * 3 * 3 * 16, 7 * 7 * 32),
    Counted("fc1", 7 * 7 * 32 * 200, 200),
    Counted("fc2", 200 * 200, 200),
    Counted("output", 200 * 10, 10),
)
"""3×3 filters, stride 2."""


@dataclass(frozen=True)
class Inference:
    """One way to use the CPUs: predicted, and published where it was."""

    name: str
    config: str
    seconds: float
    """For all images, with the reduction at the end."""
    speedup: float
    bound: str
    published: float | None = None
    """Speed-up."""

    @property
    def error(self) -> float | None:
        """Predicted over published, less 1."""
        return None if self.published is None else self.speedup / self.published - 1


def shares() -> dict[str, float]:
    """What of the sequential time each layer takes, by its multiplications."""
    total = sum(layer.products for layer in LAYERS)
    return {layer.name: layer.products / total for layer in LAYERS}


def reduce_s(processes: int) -> float:
    """The reduction of one number at the end: ⌈log2 P⌉ messages one after the other."""
    return math.ceil(math.log2(processes)) * (LATENCY + COUNT / BANDWIDTH)


def problem(sequential_s: float = PIPELINED[0]) -> Problem:
    """Inference of one image at a time, by the counted shares of a sequential run."""
    layers = tuple(Layer(name, sequential_s / IMAGES * share, 0.0, 0, 0) for name, share in shares().items())
    tensors = tuple(
        Tensor(one.name, one.name, (other.name,), one.outputs * NUMBER, 0) for one, other in itertools.pairwise(LAYERS)
    )
    cluster = Cluster("20 CPUs", Device("CPU", "cpu", 2**30), (Level("server", CPUS, BANDWIDTH, LATENCY),))
    return Problem(Profile(layers, tensors, 1, model_name="mnist"), cluster, Options(inference=True, overlap=0.0))


def cyclic() -> Plan:
    """One layer a process, four times over: process p has layer p mod 5."""
    copies = CPUS // len(LAYERS)
    stages = tuple(
        Stage((layer.name,), tuple(range(index, CPUS, len(LAYERS))), 1, 1) for index, layer in enumerate(LAYERS)
    )
    return Plan(stages, copies, inference=True)


def predict() -> list[Inference]:
    """The two published ways, the best with a stage for every layer, and the best of all."""
    given = problem()
    found = [
        _scored("pipelined, cyclic", cyclic(), given, PIPELINED[2]),
        _scored("data parallel", one_stage(given, CPUS), given, PARALLEL[2]),
    ]
    straight = Configurations.of(given, enumerate_cuts(given, 100))
    counts = balanced(tuple(shares().values()), CPUS)
    found.append(_scored("a stage a layer", straight.best(counts)[0], given, None))
    best = solve(given, Settings(solver="dp", certify=False))
    found.append(_scored("pipeplan's best", best.plan, given, None))
    return found


def balanced(work: tuple[float, ...], workers: int) -> tuple[int, ...]:
    """Replicas for given stages that make the slowest as fast as can be: each worker more goes to the slowest.

    Exact, as a stage gets a further worker only while no plan without it could be faster.
    """
    counts = [1] * len(work)
    for _ in range(workers - len(work)):
        slowest = max(range(len(work)), key=lambda index: work[index] / counts[index])
        counts[slowest] += 1
    return tuple(counts)


def _scored(name: str, plan: Plan, given: Problem, published: float | None) -> Inference:
    score = evaluate(plan, given)
    one = sum(unit.forward_s for unit in given.units)
    seconds = one + (IMAGES - 1) * score.pace_s + reduce_s(plan.busy)
    return Inference(name, plan.config, seconds, one * IMAGES / seconds, score.bound, published)
