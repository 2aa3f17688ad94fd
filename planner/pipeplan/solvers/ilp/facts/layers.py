"""The layers in the integer program: joined into blocks where they must share a stage, with the work around each block.

Layers are joined if the profile or the user ties them, or if a tensor between them is too large for any link of the
cluster to carry within U. The order constraints (2) take care of what the joins imply, such as a layer between two
joined layers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pipeplan.problem.problem import Problem
from pipeplan.problem.units import user_groups
from pipeplan.profile_data.layers import edges


@dataclass(frozen=True)
class BlockTensor:
    """A tensor between blocks: its bytes forward, and the bytes of its gradient backward."""

    producer: int
    consumers: tuple[int, ...]
    sent: float
    returned: float


@dataclass(frozen=True)
class Block:
    """Layers that share a stage, with the sums of their costs: seconds on a device of speed 1, and bytes."""

    layers: tuple[str, ...]
    forward_s: float
    backward_s: float
    update_s: float
    """The part of `backward_s` that is the optimiser's step."""
    parameters: float
    buffers: float
    saved: float
    workspace: float
    """The largest of its layers."""

    @property
    def work_s(self) -> float:
        """Forward and backward pass together."""
        return self.forward_s + self.backward_s


class LayerBlocks:
    """The blocks of a problem in which no transfer may carry more than `largest` bytes."""

    def __init__(self, problem: Problem, largest: float) -> None:
        profile, training, share = problem.profile, problem.training, problem.options.update_share
        home, kept = _homes(problem, largest), 1 + problem.cluster.executor.activation_share
        members = defaultdict(list)
        for layer in profile.layers:
            members[home[layer.name]].append(layer)
        self.blocks = [
            Block(
                layers=tuple(layer.name for layer in group),
                forward_s=sum(layer.forward_s for layer in group),
                backward_s=sum(layer.backward_s + share * layer.update_s for layer in group) if training else 0.0,
                update_s=sum(share * layer.update_s for layer in group) if training else 0.0,
                parameters=sum(layer.parameter_bytes for layer in group),
                buffers=sum(layer.buffer_bytes for layer in group),
                saved=kept * sum(layer.saved_bytes for layer in group) if training else 0.0,
                workspace=max(float(layer.workspace_bytes) for layer in group) if training else 0.0,
            )
            for _, group in sorted(members.items())
        ]
        arrows = {(home[source], home[target]) for source, target in edges(profile.tensors)}
        self.edges = sorted((source, target) for source, target in arrows if source != target)
        self.tensors = _tensors(problem, home)
        work = [block.work_s for block in self.blocks]
        self.before_s = _reachable_work([(target, source) for source, target in self.edges], work)
        self.after_s = _reachable_work(self.edges, work)
        self.home = home

    def __len__(self) -> int:
        return len(self.blocks)

    def directions(self) -> list[list[float]]:
        """Bytes of every tensor forward, and of its gradient backward unless that is never more."""
        forward = [tensor.sent for tensor in self.tensors]
        backward = [tensor.returned for tensor in self.tensors]
        if all(back <= ahead for ahead, back in zip(forward, backward, strict=True)):
            return [forward]
        return [forward, backward]


def _homes(problem: Problem, largest: float) -> dict[str, int]:
    """The index of every layer's block."""
    profile = problem.profile
    order = {layer.name: index for index, layer in enumerate(profile.layers)}
    leader = list(range(len(order)))

    def find(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    oversized = [
        (tensor.producer, *tensor.consumers)
        for tensor in profile.tensors
        if max(tensor.bytes, tensor.gradient_bytes if problem.training else 0) > largest
    ]
    for group in (*profile.together, *user_groups(profile, problem.options), *oversized):
        for one, other in itertools.pairwise(group):
            first, second = sorted((find(order[one]), find(order[other])))
            leader[second] = first
    numbers = {root: number for number, root in enumerate(sorted({find(index) for index in leader}))}
    return {name: numbers[find(index)] for name, index in order.items()}


def _tensors(problem: Problem, home: dict[str, int]) -> list[BlockTensor]:
    """The tensors between blocks; tensors with the same producer and consumers are merged."""
    sizes: dict[tuple[int, tuple[int, ...]], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for tensor in problem.profile.tensors:
        producer = home[tensor.producer]
        consumers = tuple(sorted({home[name] for name in tensor.consumers} - {producer}))
        if consumers:
            total = sizes[producer, consumers]
            total[0] += tensor.bytes
            total[1] += tensor.gradient_bytes if problem.training else 0
    return [BlockTensor(*ends, *total) for ends, total in sizes.items()]


def _reachable_work(arrows: Iterable[tuple[int, int]], work: list[float]) -> list[float]:
    """For every block, the work of all other blocks that can be reached from it."""
    following: dict[int, list[int]] = defaultdict(list)
    for source, target in arrows:
        following[source].append(target)
    totals = []
    for node in range(len(work)):
        seen, waiting = {node}, [node]
        while waiting:
            for target in following[waiting.pop()]:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        totals.append(sum(work[other] for other in seen - {node}))
    return totals
