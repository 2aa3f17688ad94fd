"""A profile: the layers of a model as a DAG, with what each costs for one minibatch on one device.

The file format is described field by field in docs/file-formats.md. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeplan import graph
from pipeplan.errors import InputError
from pipeplan.files import read_document, write_json

FORMAT = "pipeplan-profile"
VERSION = 1
LARGEST_MINIBATCH = 10**7
GRANULARITIES = ("module", "layer", "op")


@dataclass(frozen=True)
class Layer:
    """One layer, measured for one minibatch."""

    name: str
    """Unique in the profile; the stage files name layers by it."""
    forward_s: float
    """Median time of the forward pass."""
    backward_s: float
    """Median time of the backward pass."""
    parameter_bytes: int
    saved_bytes: int
    """Bytes kept from the forward pass until the backward pass."""
    module: str = ""
    """Path of the module in the model, empty for a free operator."""
    op: str = ""
    """What the layer computes, for people."""
    forward_spread_s: float = 0.0
    """Interquartile range of the measured forward times."""
    backward_spread_s: float = 0.0
    buffer_bytes: int = 0
    """Bytes of state that is not a parameter (running statistics)."""
    update_s: float = 0.0
    """Median time of the optimiser's step over its parameters."""
    workspace_bytes: int = 0
    """The most that it takes while it runs beyond what it is given, makes and keeps; 0 where that is not known."""
    like: str = ""
    """The layer that was measured in its place, being the same computation; empty where it was measured itself."""


@dataclass(frozen=True)
class Tensor:
    """An output of a layer that other layers read. It crosses a cut once, however many consumers lie behind it."""

    name: str
    producer: str
    consumers: tuple[str, ...]
    bytes: int
    """Bytes for one minibatch, sent forward."""
    gradient_bytes: int
    """Bytes of its gradient, sent backward: 0 for integers and for what needs no gradient."""


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from."""

    kind: str = "measured"
    """`measured`, `modelled`, `imported` or `calibrated`."""
    device: str = ""
    device_name: str = ""
    when: str = ""
    """ISO 8601, UTC."""
    how: str = ""
    torch: str = ""
    pipeplan: str = ""
    threads: int = 0
    warmup: int = 0
    repeats: int = 0
    traced: str = ""
    """How the model became layers."""
    processes: int = 1
    """How many measured at the same time: the times are those under that load."""
    notes: tuple[str, ...] = ()
    """What a reader should know of these numbers: drift, spread, corrections, errors."""


@dataclass(frozen=True)
class Size:
    """The layers and tensors at another minibatch size, in the order of the profile."""

    minibatch: int
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    whole_forward_s: float | None = None
    whole_backward_s: float | None = None


@dataclass(frozen=True)
class Profile:
    """A whole profile. Layers stand in a topological order; `tensors` are the edges of the DAG."""

    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    minibatch: int
    """Samples in one minibatch."""
    model_ref: str = ""
    """What the executor loads the model by: a bundled name, `file.py:callable` or `package.module:callable`."""
    model_name: str = ""
    graph_hash: str = ""
    """Hash of the traced graph; empty where the profile cannot be run (imported, modelled)."""
    dynamic_batch: bool = True
    granularity: str = "layer"
    """What one layer is, `module`, `layer` or `op`: the executor traces the model likewise."""
    provenance: Provenance = field(default_factory=Provenance)
    optimizer_name: str = "SGD with momentum"
    optimizer_state_ratio: float = 1.0
    """Bytes of optimiser state per byte of parameters: 1 for SGD with momentum, 2 for Adam."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of layers that must share a stage (tied weights, views of one storage)."""
    whole_forward_s: float | None = None
    whole_backward_s: float | None = None
    peak_bytes: int = 0
    """Peak memory of one forward and backward pass and update of the whole model; 0 where it was not measured."""
    sizes: tuple[Size, ...] = ()
    """Other minibatch sizes that were measured in the same run."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def total_s(self) -> float:
        """Forward plus backward time of all layers, for one minibatch on one device."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def made_bytes(self) -> dict[str, int]:
        """For each layer the bytes that others read of it, for one minibatch."""
        made = {layer.name: 0 for layer in self.layers}
        for tensor in self.tensors:
            made[tensor.producer] += tensor.bytes
        return made

    def rescaled(self, minibatch: int) -> Profile:
        """This profile for another minibatch size: as measured where it was, else by the sizes that were.

        Times and activations depend on it, parameters and the optimiser's step do not; see `pipeplan.rescale`.
        """
        from pipeplan.rescale import at

        if not 1 <= minibatch <= LARGEST_MINIBATCH:
            raise InputError(f"the minibatch size must be at least 1 and at most {LARGEST_MINIBATCH}, not {minibatch}")
        return at(self, minibatch)

    def to_json(self) -> dict[str, Any]:
        """The document that `save` writes."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": {
                "ref": self.model_ref,
                "name": self.model_name,
                "graph_hash": self.graph_hash,
                "dynamic_batch": self.dynamic_batch,
                "granularity": self.granularity,
            },
            "minibatch": self.minibatch,
            "provenance": {**asdict(self.provenance), "notes": list(self.provenance.notes)},
            "optimizer": {"name": self.optimizer_name, "state_bytes_per_parameter_byte": self.optimizer_state_ratio},
            "peak_bytes": self.peak_bytes,
            **_measured(self),
            "together": [list(group) for group in self.together],
            "sizes": [{"minibatch": size.minibatch, **_measured(size)} for size in self.sizes],
        }

    def digest(self) -> str:
        """A hash of everything in the profile, by which a plan names the profile that it was made from."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file by atomic replace."""
        write_json(Path(path), self.to_json())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read and check a profile; an `InputError` names the file and the field that is wrong."""
        from pipeplan.profile_file import parse

        path = Path(path)
        root = read_document(path, FORMAT, VERSION)
        try:
            return parse(root)
        except InputError as error:
            message = str(error)
            raise InputError(message if message.startswith(str(path)) else f"{path}: {message}") from None


def check(profile: Profile) -> None:
    """Raise an `InputError` unless the profile is a DAG of at least one layer with finite, non-negative costs."""
    if not profile.layers:
        raise InputError("the profile has no layers")
    names = [layer.name for layer in profile.layers]
    _check_unique("layer", names)
    _check_unique("tensor", [tensor.name for tensor in profile.tensors])
    known = set(names)
    for tensor in profile.tensors:
        for end in (tensor.producer, *tensor.consumers):
            if end not in known:
                raise InputError(f"tensor {tensor.name!r} has a dangling edge: there is no layer {end!r}")
    for group in profile.together:
        for name in group:
            if name not in known:
                raise InputError(f"`together` names a layer that does not exist: {name!r}")
    cycle = graph.find_cycle(names, edges(profile.tensors))
    if cycle:
        raise InputError(f"the layers form a cycle: {' → '.join(cycle)}")
    if profile.granularity not in GRANULARITIES:
        raise InputError(f"the granularity {profile.granularity!r} is not one of {', '.join(GRANULARITIES)}")
    counts = [profile.minibatch, *(size.minibatch for size in profile.sizes)]
    if len(set(counts)) < len(counts):
        raise InputError(f"a minibatch size appears twice: {', '.join(map(str, counts))}")
    for size in profile.sizes:
        _check_size(profile, size)


def _check_size(profile: Profile, size: Size) -> None:
    if [one.name for one in size.layers] != [one.name for one in profile.layers]:
        raise InputError(f"the layers at minibatch {size.minibatch} are not those at {profile.minibatch}")
    if [one.name for one in size.tensors] != [one.name for one in profile.tensors]:
        raise InputError(f"the tensors at minibatch {size.minibatch} are not those at {profile.minibatch}")


def _measured(one: Profile | Size) -> dict[str, Any]:
    """What both a profile and another size of it say of the layers."""
    whole = None
    if one.whole_forward_s is not None and one.whole_backward_s is not None:
        whole = {"forward_s": one.whole_forward_s, "backward_s": one.whole_backward_s}
    return {
        "whole": whole,
        "layers": [asdict(layer) for layer in one.layers],
        "tensors": [{**asdict(tensor), "consumers": list(tensor.consumers)} for tensor in one.tensors],
    }


def edges(tensors: Iterable[Tensor]) -> list[tuple[str, str]]:
    """The edges of the DAG, producer to consumer, without repetition, in order of appearance."""
    return list(dict.fromkeys((tensor.producer, consumer) for tensor in tensors for consumer in tensor.consumers))


def _check_unique(what: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"the {what} {name!r} appears {count} times")
