"""Every plan of a small problem, scored from first principles: an oracle that shares no code with the planner.

It takes the problem as plain lists and dictionaries, writes the formulas of docs/cost-model.md out again, and
enumerates assignments of layers to stages, placements of stages on workers, and depths.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Instance:
    """A small problem. Layers are dictionaries with f, b, w, s, u (forward, backward, weights, saved, buffers)."""

    layers: list[dict[str, float]]
    tensors: list[tuple[int, tuple[int, ...], float, float]]
    levels: list[tuple[int, float, float]]
    """count, bandwidth, latency of each level, innermost first."""
    memory: float = math.inf
    overlap: float = 1.0
    state: float = 1.0
    inference: bool = False
    together: tuple[tuple[int, ...], ...] = ()
    stages: int | None = None
    max_replicas: int | None = None


def best(instance: Instance) -> float:
    """The pace of the fastest plan over both plan spaces, infinite where nothing fits."""
    sizes = [1]
    for count, _, _ in instance.levels:
        sizes.append(sizes[-1] * count)
    workers = sizes[-1]
    answers = [_pipelines(instance, workers, sizes)]
    for size in sorted({size for size in sizes[1:] if 1 < size < workers}):
        copies = workers // size
        inner = _pipelines(instance, size, sizes, copies)
        weights = sum(layer["w"] for layer in instance.layers)
        sync = 0.0 if instance.inference else _allreduce(instance, copies, weights, len(instance.levels)) / copies
        answers.append(_join(inner / copies, sync, instance.overlap))
    return min(answers)


def _join(a: float, b: float, overlap: float) -> float:
    return max(a, b) + (1 - overlap) * min(a, b)


def _level(first: int, last: int, sizes: list[int]) -> int:
    return next(k for k, size in enumerate(sizes) if first // size == last // size)


def _rate(instance: Instance, level: int) -> tuple[float, float]:
    passed = [(bandwidth, latency) for count, bandwidth, latency in instance.levels[:level] if count > 1]
    if not passed:
        return math.inf, 0.0
    return min(bandwidth for bandwidth, _ in passed), max(latency for _, latency in passed)


def _allreduce(instance: Instance, members: int, size: float, level: int) -> float:
    bandwidth, latency = _rate(instance, level)
    return 2 * (members - 1) / members * size / bandwidth + 2 * (members - 1) * latency


def _pipelines(instance: Instance, workers: int, sizes: list[int], copies: int = 1) -> float:
    """The fastest single pipeline on the first `workers` workers."""
    answer = math.inf
    count = len(instance.layers)
    for stages in range(1, min(count, workers) + 1):
        if instance.stages not in (None, stages):
            continue
        for homes in itertools.product(range(stages), repeat=count):
            if len(set(homes)) < stages or not _valid(instance, homes):
                continue
            for placement in _placements(stages, workers, instance.max_replicas or workers):
                answer = min(answer, _score(instance, homes, placement, sizes, copies))
    return answer


def _valid(instance: Instance, homes: tuple[int, ...]) -> bool:
    ordered = all(homes[source] <= homes[target] for source, targets, _, _ in instance.tensors for target in targets)
    return ordered and all(len({homes[layer] for layer in group}) == 1 for group in instance.together)


def _placements(stages: int, workers: int, most: int, first: int = 0):  # type: ignore[no-untyped-def]
    if stages == 0:
        yield ()
        return
    for start in range(first, workers):
        for end in range(start + 1, min(workers, start + most) + 1):
            for rest in _placements(stages - 1, workers, most, end):
                yield ((start, end), *rest)


def _score(
    instance: Instance, homes: tuple[int, ...], placement: tuple[tuple[int, int], ...], sizes: list[int], copies: int
) -> float:
    resources, transfers, groups, across = [0.0], [], [], [(0.0, 0.0)]
    for stage, (start, end) in enumerate(placement):
        mine = [layer for layer, home in zip(instance.layers, homes, strict=True) if home == stage]
        replicas = end - start
        work = sum(layer["f"] + (0 if instance.inference else layer["b"]) for layer in mine) / replicas
        sync = 0.0
        if not instance.inference and replicas > 1:
            span = _level(start, end - 1, sizes)
            sync = _allreduce(instance, replicas, sum(layer["w"] for layer in mine), span) / replicas
        resources.append(_join(work, sync, instance.overlap))
        groups.append(sync * replicas)
        if stage + 1 < len(placement):
            bandwidth, latency = _rate(instance, _level(start, placement[stage + 1][1] - 1, sizes))
            cut = [t for t in instance.tensors if homes[t[0]] <= stage and any(homes[c] > stage for c in t[1])]
            forward = sum(tensor[2] for tensor in cut)
            backward = 0.0 if instance.inference else sum(tensor[3] for tensor in cut)
            resources.append(max(forward, backward) / bandwidth)
            transfers.append(max(forward, backward) / bandwidth + latency)
            across.append((forward, backward))
    across.append((0.0, 0.0))
    floor = max(resources)
    if math.isinf(instance.memory):
        return floor
    # The smallest pace of at least the floor whose depths fit: depths change at finitely many paces only.
    paces = {floor}
    if not instance.inference:
        paces |= {pace for pace in _steps(transfers, groups, copies) if pace > floor}
    fitting = (
        pace for pace in sorted(paces) if _fits(instance, homes, placement, pace, (transfers, groups), across, copies)
    )
    return next(fitting, math.inf)


def _steps(transfers: list[float], groups: list[float], copies: int) -> set[float]:
    """All paces at which a depth may change: where what a stage must cover is a whole number of minibatches."""
    found = set(groups) - {0.0}
    for stage, transfer in enumerate(transfers):
        if copies > 1:
            found |= {2 * transfer / (n + 2 / copies) for n in range(-2, 60) if n + 2 / copies > 0}
            continue
        for waits in itertools.chain.from_iterable(
            itertools.combinations(groups[stage : stage + 2], k) for k in range(3)
        ):
            found |= {(2 * transfer + sum(waits)) / (n + len(waits)) for n in range(60) if n + len(waits) > 0}
    return found


def _fits(
    instance: Instance,
    homes: tuple[int, ...],
    placement: tuple[tuple[int, int], ...],
    pace: float,
    times: tuple[list[float], list[float]],
    across: list[tuple[float, float]],
    copies: int,
) -> bool:
    """Whether every worker's memory suffices at the depths that a pace needs, from the last stage to the first."""
    demanded, (transfers, groups) = 0.0, times
    for stage in range(len(placement) - 1, -1, -1):
        start, end = placement[stage]
        replicas = end - start
        mine = [layer for layer, home in zip(instance.layers, homes, strict=True) if home == stage]
        weights, saved = sum(layer["w"] for layer in mine), sum(layer["s"] for layer in mine)
        memory = sum(layer["u"] for layer in mine) + sum(across[stage]) + sum(across[stage + 1])
        wait = replicas - 1 / copies if copies > 1 else max(0.0, groups[stage] / pace - 1)
        depth = 1
        if instance.inference:
            memory += weights
        else:
            if stage + 1 < len(placement):
                depth = 1 + math.ceil((demanded + wait + 2 * transfers[stage] / pace) / replicas - 1e-9)
            held = across[stage][0] + across[stage + 1][0]
            memory += weights * (1 + instance.state) + depth * (weights + saved + held)
            if replicas * copies > 1:
                memory += weights * (1 if len(placement) == 1 else 2)
        if memory > instance.memory:
            return False
        demanded = depth * replicas + wait
    return True
