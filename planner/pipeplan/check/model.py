"""The layers of a profile as bit sets: which must stay together, all cuts, and what adds up or crosses at a cut.

Bit i, least significant first, stands for layer i in the profile's order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.check.document import Asked
from pipeplan.errors import InputError
from pipeplan.profile_data import Profile

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Edge:
    """A tensor that layers read: it crosses every cut with its producer inside and a reader outside."""

    producer: int
    readers: int
    """A bit set."""
    bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Model:
    """What the check needs of a profile."""

    names: tuple[str, ...]
    forward_s: Floats
    """By layer, on a device of speed 1."""
    backward_s: Floats
    update_s: Floats
    """The optimiser's step, as far as it falls to one minibatch of a worker."""
    parameters: Floats
    buffers: Floats
    saved: Floats
    edges: tuple[Edge, ...]
    blocks: tuple[int, ...]
    """Bit sets of the layers that no cut separates, each after all that it reads from."""
    needs: tuple[int, ...]
    """For each block: all that it reads from, directly or not."""
    state_ratio: float
    """Bytes of the optimiser's state per byte of parameters."""
    training: bool

    @property
    def everything(self) -> int:
        """The cut with all layers."""
        return (1 << len(self.names)) - 1

    def set_of(self, layers: Iterable[str]) -> int:
        """The bit set of layers by name."""
        position = {name: index for index, name in enumerate(self.names)}
        return sum(1 << position[name] for name in layers)

    def cuts(self, limit: int) -> list[int]:
        """All ideals, the empty one first, built up block by block; an `InputError` beyond `limit`."""
        found = [0]
        for block, needs in zip(self.blocks, self.needs, strict=True):
            # Every ideal of the first blocks is one without the last of them, or such a one and that block.
            found += [cut | block for cut in found if needs & ~cut == 0]
            if len(found) > limit:
                raise InputError(f"the model has more than {limit} cuts: too many to check the certificate")
        return found

    def members(self, cuts: list[int]) -> Flags:
        """Whether a layer is in a cut, by cut and layer."""
        width = (len(self.names) + 7) // 8
        octets = np.frombuffer(b"".join(cut.to_bytes(width, "little") for cut in cuts), dtype=np.uint8)
        bits = np.unpackbits(octets.reshape(len(cuts), width), axis=1, bitorder="little")
        return bits[:, : len(self.names)].astype(bool)

    def crossing(self, cuts: list[int]) -> tuple[Floats, Floats]:
        """Bytes that cross each cut, forward and backward: each tensor once, however many read it behind the cut."""
        inside = self.members(cuts)
        forward, backward = np.zeros(len(cuts)), np.zeros(len(cuts))
        for edge in self.edges:
            across = inside[:, edge.producer] & ~inside[:, _bits(edge.readers)].all(axis=1)
            forward += across * float(edge.bytes)
            backward += across * float(edge.gradient_bytes)
        return forward, backward


def build(profile: Profile, asked: Asked, *, inference: bool, update_every: int = 1) -> Model:
    """The model of a profile, for training or for inference (no backward pass, no gradients, nothing kept).

    `update_every`: the minibatches of an update that all stages have in common, else 1.
    """
    layers, training = profile.layers, not inference
    position = {layer.name: index for index, layer in enumerate(layers)}
    edges = tuple(
        Edge(
            position[tensor.producer],
            sum(1 << reader for reader in {position[name] for name in tensor.consumers}),
            tensor.bytes,
            tensor.gradient_bytes * training,
        )
        for tensor in profile.tensors
    )
    groups = [*profile.together, *asked.together]
    groups += [(edge.producer, *edge.consumers) for edge in profile.tensors if edge.producer in asked.no_cut_after]
    for name in (*(name for group in groups for name in group), *asked.no_cut_after, *(pin for pin, _ in asked.pins)):
        if name not in position:
            raise InputError(f"the options name a layer that the profile does not have: {name!r}")
    blocks, needs = _blocks(len(layers), edges, [[position[name] for name in group] for group in groups])
    return Model(
        names=tuple(position),
        forward_s=np.array([layer.forward_s for layer in layers]),
        backward_s=np.array([layer.backward_s * training for layer in layers]),
        update_s=np.array([layer.update_s * training / update_every for layer in layers]),
        parameters=np.array([layer.parameter_bytes for layer in layers], dtype=float),
        buffers=np.array([layer.buffer_bytes for layer in layers], dtype=float),
        saved=np.array([layer.saved_bytes * training for layer in layers], dtype=float),
        edges=edges,
        blocks=blocks,
        needs=needs,
        state_ratio=profile.optimizer_state_ratio,
        training=training,
    )


def _blocks(count: int, edges: Iterable[Edge], groups: list[list[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks of layers that reach each other once groups are tied both ways, in a topological order, and their needs.

    Reachability by Warshall's closure: `before[i]` becomes all layers that must be in every cut that layer i is in.
    """
    before = [1 << layer for layer in range(count)]
    for edge in edges:
        for layer in _bits(edge.readers):
            before[layer] |= 1 << edge.producer
    for group in groups:
        tied = sum(1 << layer for layer in set(group))
        for layer in group:
            before[layer] |= tied
    for middle in range(count):
        bit, reached = 1 << middle, before[middle]
        before = [have | reached if have & bit else have for have in before]
    # What a layer needs determines its block; needing less comes first.
    needs = sorted(set(before), key=lambda have: (have.bit_count(), have))
    blocks = [sum(1 << layer for layer in range(count) if before[layer] == have) for have in needs]
    return tuple(blocks), tuple(have & ~block for have, block in zip(needs, blocks, strict=True))


def _bits(members: int) -> list[int]:
    return [position for position in range(members.bit_length()) if members >> position & 1]
