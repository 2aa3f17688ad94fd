"""Random small problems, as the oracle takes them and as the planner does."""

from __future__ import annotations

import math
import random

from brute_force import Instance

from pipeplan.cluster import Cluster, Device, Level
from pipeplan.problem import Options, Problem
from pipeplan.profile import Layer, Profile, Tensor

SHAPES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (1, 3), (4, 1), (2, 1, 2)]


def random_instance(seed: int, *, layers: int = 6) -> Instance:
    """A DAG of up to `layers` layers on up to 6 workers; a fresh mixture of limits and options for every seed."""
    rng = random.Random(seed)
    count = rng.randint(1, layers)
    tensors = []
    for source in range(count - 1):
        chain = rng.random() < 0.7
        targets = {source + 1} if chain else set()
        targets |= {target for target in range(source + 1, count) if rng.random() < 0.2}
        if targets:
            size = float(rng.randint(0, 40))
            gradient = size if rng.random() < 0.8 else 0.0
            tensors.append((source, tuple(sorted(targets)), size, gradient))
    shape = rng.choice(SHAPES)
    bandwidths = sorted((float(rng.choice([4, 8, 20, 100])) for _ in shape), reverse=rng.random() < 0.8)
    levels = [(n, bandwidth, rng.choice([0.0, 0.0, 0.5])) for n, bandwidth in zip(shape, bandwidths, strict=True)]
    made = [
        {
            "f": float(rng.randint(0, 10)),
            "b": float(rng.randint(0, 20)),
            "w": float(rng.choice([0, 0, 5, 30, 100])),
            "s": float(rng.randint(0, 60)),
            "u": float(rng.choice([0, 0, 7])),
        }
        for _ in range(count)
    ]
    together = (tuple(sorted(rng.sample(range(count), 2))),) if count >= 3 and rng.random() < 0.2 else ()
    return Instance(
        layers=made,
        tensors=tensors,
        levels=levels,
        memory=math.inf if rng.random() < 0.4 else float(rng.choice([250, 400, 700, 1200])),
        overlap=rng.choice([1.0, 1.0, 0.0, 0.5]),
        state=rng.choice([0.0, 1.0, 2.0]),
        inference=rng.random() < 0.15,
        together=together,
        stages=rng.randint(1, count) if rng.random() < 0.1 and math.prod(shape) >= count else None,
        max_replicas=rng.choice([None, None, None, 1, 2]),
    )


def to_problem(instance: Instance) -> Problem:
    """The same problem in the planner's types. An infinite memory becomes an option, not a number."""
    profile = Profile(
        layers=tuple(
            Layer(f"l{i}", d["f"], d["b"], int(d["w"]), int(d["s"]), buffer_bytes=int(d["u"]))
            for i, d in enumerate(instance.layers)
        ),
        tensors=tuple(
            Tensor(f"t{k}", f"l{source}", tuple(f"l{c}" for c in targets), int(size), int(gradient))
            for k, (source, targets, size, gradient) in enumerate(instance.tensors)
        ),
        minibatch=1,
        optimizer_state_ratio=instance.state,
        together=tuple(tuple(f"l{i}" for i in group) for group in instance.together),
    )
    unlimited = math.isinf(instance.memory)
    cluster = Cluster(
        "test",
        Device("d", "cpu", 1 if unlimited else int(instance.memory)),
        tuple(Level(f"n{i}", *level) for i, level in enumerate(instance.levels)),
    )
    options = Options(
        inference=instance.inference,
        overlap=instance.overlap,
        memory=not unlimited,
        stages=instance.stages,
        max_replicas=instance.max_replicas,
    )
    return Problem(profile, cluster, options)
