"""A profile: the layers of a model as a DAG, with what each costs for one minibatch on one device.

The file format is described field by field in docs/file-formats.md. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeplan import graph
from pipeplan.errors import InputError
from pipeplan.files import Node, read_document, write_json

FORMAT = "pipeplan-profile"
VERSION = 1
LARGEST_MINIBATCH = 10**7


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
    """`measured`, `modelled` or `imported`."""
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
    provenance: Provenance = field(default_factory=Provenance)
    optimizer_name: str = "SGD with momentum"
    optimizer_state_ratio: float = 1.0
    """Bytes of optimiser state per byte of parameters: 1 for SGD with momentum, 2 for Adam."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of layers that must share a stage (tied weights, views of one storage)."""
    whole_forward_s: float | None = None
    whole_backward_s: float | None = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def total_s(self) -> float:
        """Forward plus backward time of all layers, for one minibatch on one device."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def rescaled(self, minibatch: int) -> Profile:
        """This profile for another minibatch size: times and activations scale linearly, parameters do not."""
        if not 1 <= minibatch <= LARGEST_MINIBATCH:
            raise InputError(f"the minibatch size must be at least 1 and at most {LARGEST_MINIBATCH}, not {minibatch}")
        scale = minibatch / self.minibatch
        layers = tuple(
            replace(
                layer,
                forward_s=layer.forward_s * scale,
                backward_s=layer.backward_s * scale,
                forward_spread_s=layer.forward_spread_s * scale,
                backward_spread_s=layer.backward_spread_s * scale,
                saved_bytes=round(layer.saved_bytes * scale),
            )
            for layer in self.layers
        )
        tensors = tuple(
            replace(tensor, bytes=round(tensor.bytes * scale), gradient_bytes=round(tensor.gradient_bytes * scale))
            for tensor in self.tensors
        )
        whole_forward = None if self.whole_forward_s is None else self.whole_forward_s * scale
        whole_backward = None if self.whole_backward_s is None else self.whole_backward_s * scale
        return replace(
            self,
            layers=layers,
            tensors=tensors,
            minibatch=minibatch,
            whole_forward_s=whole_forward,
            whole_backward_s=whole_backward,
        )

    def to_json(self) -> dict[str, Any]:
        """The document that `save` writes."""
        whole = None
        if self.whole_forward_s is not None and self.whole_backward_s is not None:
            whole = {"forward_s": self.whole_forward_s, "backward_s": self.whole_backward_s}
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": {
                "ref": self.model_ref,
                "name": self.model_name,
                "graph_hash": self.graph_hash,
                "dynamic_batch": self.dynamic_batch,
            },
            "minibatch": self.minibatch,
            "provenance": asdict(self.provenance),
            "optimizer": {"name": self.optimizer_name, "state_bytes_per_parameter_byte": self.optimizer_state_ratio},
            "whole": whole,
            "layers": [asdict(layer) for layer in self.layers],
            "tensors": [{**asdict(tensor), "consumers": list(tensor.consumers)} for tensor in self.tensors],
            "together": [list(group) for group in self.together],
        }

    def digest(self) -> str:
        """A hash of everything in the profile, by which a plan names the profile that it was made from."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the profile by atomic replace."""
        write_json(path, self.to_json())

    @staticmethod
    def load(path: Path) -> Profile:
        """Read and check a profile; an `InputError` names the file and the field that is wrong."""
        root = read_document(path, FORMAT, VERSION)
        try:
            return _parse(root)
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


def edges(tensors: Iterable[Tensor]) -> list[tuple[str, str]]:
    """The edges of the DAG, producer to consumer, without repetition, in order of appearance."""
    return list(dict.fromkeys((tensor.producer, consumer) for tensor in tensors for consumer in tensor.consumers))


def _check_unique(what: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"the {what} {name!r} appears {count} times")


def _parse(root: Node) -> Profile:
    model, optimizer, whole = root["model"], root["optimizer"], root.get("whole")
    return Profile(
        layers=tuple(_layer(node) for node in root["layers"].items()),
        tensors=tuple(_tensor(node) for node in root["tensors"].items()),
        minibatch=root["minibatch"].integer(minimum=1),
        model_ref=model["ref"].text(),
        model_name=model["name"].text(),
        graph_hash=model["graph_hash"].text(),
        dynamic_batch=model["dynamic_batch"].boolean(),
        provenance=_provenance(root["provenance"]),
        optimizer_name=optimizer["name"].text(),
        optimizer_state_ratio=optimizer["state_bytes_per_parameter_byte"].number(),
        together=tuple(tuple(name.text() for name in group.items()) for group in root["together"].items()),
        whole_forward_s=whole["forward_s"].number() if whole else None,
        whole_backward_s=whole["backward_s"].number() if whole else None,
    )


def _layer(node: Node) -> Layer:
    node = Node(node.value, f"{node.where} ({_name_of(node)})")
    return Layer(
        name=node["name"].text(),
        module=node["module"].text(),
        op=node["op"].text(),
        forward_s=node["forward_s"].number(),
        backward_s=node["backward_s"].number(),
        forward_spread_s=node["forward_spread_s"].number(),
        backward_spread_s=node["backward_spread_s"].number(),
        parameter_bytes=node["parameter_bytes"].integer(),
        buffer_bytes=node["buffer_bytes"].integer(),
        saved_bytes=node["saved_bytes"].integer(),
    )


def _tensor(node: Node) -> Tensor:
    node = Node(node.value, f"{node.where} ({_name_of(node)})")
    return Tensor(
        name=node["name"].text(),
        producer=node["producer"].text(),
        consumers=tuple(consumer.text() for consumer in node["consumers"].items()),
        bytes=node["bytes"].integer(),
        gradient_bytes=node["gradient_bytes"].integer(),
    )


def _name_of(node: Node) -> str:
    name = node["name"].text()
    return repr(name) if len(name) <= 60 else repr(name[:57] + "…")


def _provenance(node: Node) -> Provenance:
    return Provenance(
        kind=node["kind"].text(),
        device=node["device"].text(),
        device_name=node["device_name"].text(),
        when=node["when"].text(),
        how=node["how"].text(),
        torch=node["torch"].text(),
        pipeplan=node["pipeplan"].text(),
        threads=node["threads"].integer(),
        warmup=node["warmup"].integer(),
        repeats=node["repeats"].integer(),
    )
