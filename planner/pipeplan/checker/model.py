"""The layers of a profile with their costs, the blocks that no cut separates, and the cuts.

Blocks and cuts are bit sets of layers: bit i, counted from the least significant bit, is layer i in the profile's
order. `Totals` has sums of costs over the layers inside every cut. A stage's sum is the difference of two such sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.document import PlanDocument
from pipeplan.errors import InputError
from pipeplan.profile_data.fsdp_units import fsdp_units
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class CheckedTensor:
    """A tensor that layers read. It crosses every cut with its producer inside and a reader outside."""

    producer: int
    """Index of the layer that computes the tensor."""
    readers: int
    """The layers that read it, as a bit set."""
    bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class CheckedModel:
    """The layers of a profile in the form that the checks need: arrays over layers. Times are for a device of speed 1,
    in seconds.
    """

    names: tuple[str, ...]
    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    """Time of the optimiser's step that is charged to one minibatch of a worker."""
    parameters: Floats
    """Bytes of parameters."""
    buffers: Floats
    """Bytes of frozen weights and of module buffers."""
    frozen: Floats
    """Bytes of frozen weights."""
    saved: Floats
    """Bytes saved for the backward pass."""
    workspace: Floats
    """Bytes that a layer needs while it runs."""
    edges: tuple[CheckedTensor, ...]
    blocks: tuple[int, ...]
    """Sets of layers that no cut separates, in topological order."""
    needs: tuple[int, ...]
    """For each block: the set of all layers that it reads from, directly or indirectly."""
    state_ratio: float
    """Bytes of the optimiser's state per byte of parameters."""
    training: bool
    ties: tuple[tuple[int, int, float], ...] = ()
    """Weights that layers in several stages may share: (layers as a bit set, the layer that is charged, bytes)."""
    units: tuple[tuple[int, int, bool], ...] = ()
    """The units whose weights FSDP gathers: (first layer, layer after the last, whether it gathers its own weights)."""
    one_stage: bool = False
    """Whether the options ask for one stage, so that there are no cuts between layers."""
    corrects: bool = False
    """Whether a stage keeps a step of the optimiser, as large as its weights, for each weight version except one."""

    @property
    def everything(self) -> int:
        """The cut that contains all layers."""
        return (1 << len(self.names)) - 1

    @property
    def shares(self) -> bool:
        """Whether layers that a cut may separate share weights."""
        return not self.one_stage and any(
            size and sharers & block not in (0, sharers) for sharers, _, size in self.ties for block in self.blocks
        )

    def set_of(self, layers: Iterable[str]) -> int:
        """The bit set of the layers with these names."""
        position = {name: index for index, name in enumerate(self.names)}
        return sum(1 << position[name] for name in layers)

    def cuts(self, limit: int) -> list[int]:
        """All cuts, from the empty one to the one with all layers. Raises an `InputError` for more than `limit`."""
        cuts = [0]
        for block, needs in zip(self.blocks, self.needs, strict=True):
            # The cuts of the blocks up to this block are the cuts of the earlier blocks, with or without this block.
            cuts += [cut | block for cut in cuts if needs & ~cut == 0]
            if len(cuts) > limit:
                raise InputError(f"the model has more than {limit} cuts: too many to check the certificate")
        return cuts

    def members(self, cuts: list[int]) -> Flags:
        """Membership of layers in cuts: an array of shape (cuts, layers)."""
        width = (len(self.names) + 7) // 8
        octets = np.frombuffer(b"".join(cut.to_bytes(width, "little") for cut in cuts), dtype=np.uint8)
        bits = np.unpackbits(octets.reshape(len(cuts), width), axis=1, bitorder="little")
        return bits[:, : len(self.names)].astype(bool)

    def crossing(self, cuts: list[int]) -> tuple[Floats, Floats]:
        """Bytes that cross each cut forward and backward. A tensor counts once, however many layers read it."""
        inside = self.members(cuts)
        forward, backward = np.zeros(len(cuts)), np.zeros(len(cuts))
        for edge in self.edges:
            across = inside[:, edge.producer] & ~inside[:, _bits(edge.readers)].all(axis=1)
            forward += across * float(edge.bytes)
            backward += across * float(edge.gradient_bytes)
        return forward, backward


def checked_model(profile: Profile, document: PlanDocument) -> CheckedModel:
    """The model of a profile, for training or for inference (no backward pass, no gradients, no saved activations).

    With a flush, layers that share weights may be in different stages. Raises an `InputError` if the options name a
    layer that does not exist.
    """
    options = document.options
    layers, training = profile.layers, not document.inference
    position = {layer.name: index for index, layer in enumerate(layers)}
    edges = tuple(
        CheckedTensor(
            position[tensor.producer],
            sum(1 << reader for reader in {position[name] for name in tensor.consumers}),
            tensor.bytes,
            tensor.gradient_bytes * training,
        )
        for tensor in profile.tensors
    )
    apart = document.flushes and not document.virtual
    update_every = document.minibatches if document.accumulates else 1
    kept = training * (1 + document.cluster.executor.activation_share)
    groups = [*profile.together, *options.together, *(() if apart else (tie.layers for tie in profile.tied))]
    groups += [(edge.producer, *edge.consumers) for edge in profile.tensors if edge.producer in options.no_cut_after]
    for name in (
        *(name for group in groups for name in group),
        *options.no_cut_after,
        *(pin for pin, _ in options.pins),
    ):
        if name not in position:
            raise InputError(f"the options name a layer that the profile does not have: {name!r}")
    blocks, needs = _blocks(len(layers), edges, [[position[name] for name in group] for group in groups])
    return CheckedModel(
        names=tuple(position),
        forward_s=np.array([layer.forward_s for layer in layers]),
        backward_s=np.array([layer.backward_s * training for layer in layers]),
        update_s=np.array([layer.update_s * training / update_every for layer in layers]),
        parameters=np.array([layer.parameter_bytes for layer in layers], dtype=float),
        buffers=np.array([layer.buffer_bytes for layer in layers], dtype=float),
        frozen=np.array([layer.frozen_bytes for layer in layers], dtype=float),
        saved=np.array([layer.saved_bytes * kept for layer in layers], dtype=float),
        workspace=np.array([layer.workspace_bytes * training for layer in layers], dtype=float),
        edges=edges,
        blocks=blocks,
        needs=needs,
        state_ratio=profile.optimizer_state_ratio,
        training=training,
        ties=tuple(
            (sum(1 << position[name] for name in set(tie.layers)), position[tie.layers[0]], float(tie.bytes))
            for tie in profile.tied
            if apart
        ),
        one_stage=options.stages == 1,
        units=_units(layers),
        corrects=options.correction == "ef",
    )


def _units(layers: Sequence[Layer]) -> tuple[tuple[int, int, bool], ...]:
    found, start = [], 0
    for unit in fsdp_units(layers):
        found.append((start, start + len(unit.layers), unit.wrapped))
        start += len(unit.layers)
    return tuple(found)


def _blocks(
    count: int, edges: Iterable[CheckedTensor], groups: list[list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The blocks of layers that no cut separates, in topological order, and the layers that each needs.

    A block is a set of layers that reach each other after adding edges in both directions inside each group.
    Reachability is computed as Warshall's transitive closure: `before[i]` becomes the set of all layers that are in
    every cut that contains layer i.
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
    # Layers with the same set are one block, and a block with a smaller set comes first.
    needs = sorted(set(before), key=lambda have: (have.bit_count(), have))
    blocks = [sum(1 << layer for layer in range(count) if before[layer] == have) for have in needs]
    return tuple(blocks), tuple(have & ~block for have, block in zip(needs, blocks, strict=True))


def _bits(members: int) -> list[int]:
    """The positions of the bits that are 1."""
    return [position for position in range(members.bit_length()) if members >> position & 1]


@dataclass(frozen=True)
class TieInCuts:
    """A weight that several layers share, as arrays over all cuts."""

    size: float
    """Bytes of the weight."""
    sharers: Floats
    """Number of layers inside each cut that share the weight."""
    charged: Flags
    """Whether the layer that is charged for the weight is inside each cut."""


@dataclass(frozen=True)
class Totals:
    """Sums as arrays over cuts, from the empty cut to the cut with all layers, in seconds and bytes. A stage lies
    between two cuts.
    """

    cuts: list[int]
    """The cuts as bit sets."""
    packed: NDArray[np.uint8]
    """The layers inside every cut, eight to a byte."""
    forward_s: Floats
    backward_s: Floats
    """Backward passes and the optimiser's step."""
    update_s: Floats
    """Only the optimiser's step."""
    parameters: Floats
    buffers: Floats
    saved: Floats
    sent: Floats
    """Bytes that cross the cut forward."""
    returned: Floats
    """Bytes that cross the cut backward."""
    crossing: Floats
    """Bytes that cross the cut in both directions."""
    workspace: tuple[tuple[float, NDArray[np.uint8]], ...]
    """(size of a workspace, the layers with this workspace, eight to a byte), the smallest first."""
    ties: tuple[TieInCuts, ...]
    """The weights that layers in several stages may share."""

    def largest_workspace(self, cut: int, before: NDArray[np.intp]) -> Floats:
        """Largest workspace of a layer of the stages from the cuts `before` to `cut`, in bytes."""
        most = np.zeros(len(before))
        if not self.workspace:
            return most
        between = self.packed[cut] & ~self.packed[before]
        for size, layers in self.workspace:
            most[(between & layers).any(axis=1)] = size
        return most

    def weights(self, cut: int, before: NDArray[np.intp]) -> Floats:
        """Bytes of the weights of the stages from the cuts `before` to `cut`, including their copies of shared
        weights.
        """
        bytes_: Floats = self.parameters[cut] - self.parameters[before]
        for tie in self.ties:
            inside = tie.sharers[cut] - tie.sharers[before]
            bytes_ = bytes_ + tie.size * ((inside > 0) & (tie.charged[cut] == tie.charged[before]))
        return bytes_

    def exchanged(self, cut: int, before: NDArray[np.intp]) -> list[Floats]:
        """Bytes of each weight that the stages share with other stages; 0 for weights that they do not share."""
        found = []
        for tie in self.ties:
            inside = tie.sharers[cut] - tie.sharers[before]
            found.append(tie.size * ((inside > 0) & (inside < tie.sharers[-1])))
        return found

    @property
    def busier(self) -> Floats:
        """Bytes that cross the cut in the busier direction."""
        busier: Floats = np.maximum(self.sent, self.returned)
        return busier

    @staticmethod
    def of(model: CheckedModel, cuts: list[int]) -> Totals:
        """The totals of a model at some of its cuts: `model.cuts`, or those of one plan."""
        inside = model.members(cuts)
        weights = inside.astype(float)
        sent, returned = model.crossing(cuts)
        return Totals(
            cuts=cuts,
            packed=np.packbits(inside, axis=1),
            forward_s=weights @ model.forward_s,
            backward_s=weights @ (model.backward_s + model.update_s),
            update_s=weights @ model.update_s,
            parameters=weights @ model.parameters,
            buffers=weights @ model.buffers,
            saved=weights @ model.saved,
            sent=sent,
            returned=returned,
            crossing=sent + returned,
            workspace=tuple(
                (float(size), np.packbits(model.workspace == size)) for size in np.unique(model.workspace) if size
            ),
            ties=tuple(
                TieInCuts(size, weights[:, _bits(sharers)].sum(axis=1), inside[:, charged])
                for sharers, charged, size in model.ties
            ),
        )

    def inside(self, cut: int) -> NDArray[np.intp]:
        """Indices of the cuts that are proper subsets of a cut."""
        subsets = ~(self.packed & ~self.packed[cut]).any(axis=1)
        subsets[cut] = False
        return np.flatnonzero(subsets)

    def holds(self, cuts: NDArray[np.intp], layer: int) -> NDArray[np.bool_]:
        """Whether each of these cuts contains a layer."""
        contains: NDArray[np.bool_] = self.packed[cuts, layer // 8] >> (7 - layer % 8) & 1 == 1
        return contains
