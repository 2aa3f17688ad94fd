"""The records that a profile consists of: layers, the tensors between them, further minibatch sizes, and provenance.

docs/file-formats.md describes the profile file field by field. Times are seconds and sizes are bytes, each for one
minibatch on one device. Every `from_json` raises an `InputError` that names the field that is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeplan.util.files import Node
from pipeplan.util.numeric_fields import settle_numbers


@dataclass(frozen=True)
class Layer:
    """One layer, measured for one minibatch."""

    name: str
    """Unique in the profile. The stage files refer to layers by this name."""
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
    """The operation, as text for people."""
    forward_spread_s: float = 0.0
    """Interquartile range of the measured forward times."""
    backward_spread_s: float = 0.0
    """Interquartile range of the measured backward times."""
    buffer_bytes: int = 0
    """Bytes of state that is not a parameter, such as running statistics."""
    update_s: float = 0.0
    """Median time of the optimiser's step over the layer's parameters."""
    workspace_bytes: int = 0
    """Peak of the memory that the layer allocates temporarily while it runs, beyond its inputs, its outputs and what it
    saves for the backward pass; 0 where it is not known."""
    like: str = ""
    """Name of the layer that was measured in place of this one because both compute the same; empty where this layer
    was measured itself."""

    def __post_init__(self) -> None:
        settle_numbers(self)

    @staticmethod
    def from_json(node: Node) -> Layer:
        """Read one entry of `layers`."""
        node = _with_name_in_place(node)
        update, workspace, like = node.get("update_s"), node.get("workspace_bytes"), node.get("like")
        return Layer(
            name=node["name"].text(),
            module=node["module"].text(),
            op=node["op"].text(),
            forward_s=node["forward_s"].number(),
            backward_s=node["backward_s"].number(),
            forward_spread_s=node["forward_spread_s"].number(),
            backward_spread_s=node["backward_spread_s"].number(),
            parameter_bytes=node["parameter_bytes"].size(),
            buffer_bytes=node["buffer_bytes"].size(),
            saved_bytes=node["saved_bytes"].size(),
            update_s=update.number() if update else 0.0,
            workspace_bytes=workspace.size() if workspace else 0,
            like=like.text() if like else "",
        )


@dataclass(frozen=True)
class Tensor:
    """An output of a layer that other layers read. It crosses a cut once, however many consumers lie behind the cut."""

    name: str
    producer: str
    """Name of the layer that computes it."""
    consumers: tuple[str, ...]
    """Names of the layers that read it."""
    bytes: int
    """Size for one minibatch, sent forward."""
    gradient_bytes: int
    """Size of its gradient, sent backward: 0 for integers and for tensors that need no gradient."""

    def __post_init__(self) -> None:
        settle_numbers(self)

    @staticmethod
    def from_json(node: Node) -> Tensor:
        """Read one entry of `tensors`."""
        node = _with_name_in_place(node)
        return Tensor(
            name=node["name"].text(),
            producer=node["producer"].text(),
            consumers=tuple(consumer.text() for consumer in node["consumers"].items()),
            bytes=node["bytes"].size(),
            gradient_bytes=node["gradient_bytes"].size(),
        )


@dataclass(frozen=True)
class Provenance:
    """The origin of a profile's figures: device, method, versions, and remarks."""

    kind: str = "measured"
    """`measured`, `modelled`, `imported` or `calibrated`."""
    device: str = ""
    """`cpu` or `cuda`."""
    device_name: str = ""
    """The model of the device, such as `Tesla V100-SXM2-16GB`."""
    when: str = ""
    """ISO 8601, UTC."""
    how: str = ""
    """The method of measurement or estimation, as text for people."""
    torch: str = ""
    """Version of torch."""
    pipeplan: str = ""
    """Version of pipeplan."""
    threads: int = 0
    """Threads of each measuring process."""
    warmup: int = 0
    """Passes that were run before the measured ones."""
    repeats: int = 0
    """Measured passes of each layer."""
    traced: str = ""
    """The method by which the model was traced into layers."""
    processes: int = 1
    """Number of processes that measured at the same time; the times are those under that load."""
    notes: tuple[str, ...] = ()
    """Remarks on the figures for the reader: drift, spread, corrections, errors."""

    @staticmethod
    def from_json(node: Node) -> Provenance:
        """Read the field `provenance`."""
        traced, processes, notes = node.get("traced"), node.get("processes"), node.get("notes")
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
            traced=traced.text() if traced else "",
            processes=processes.integer(minimum=1) if processes else 1,
            notes=tuple(note.text() for note in notes.items()) if notes else (),
        )


@dataclass(frozen=True)
class Size:
    """The layers and tensors of a profile as measured at one minibatch size, in the order of the profile."""

    minibatch: int
    """Samples in one minibatch."""
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    whole_forward_s: float | None = None
    """Forward time of the whole model in one piece; None where it was not measured."""
    whole_backward_s: float | None = None
    """Backward time of the whole model in one piece; None where it was not measured."""

    def __post_init__(self) -> None:
        settle_numbers(self)

    @staticmethod
    def from_json(node: Node) -> Size:
        """Read one entry of `sizes`. The profile itself has the same fields for its own minibatch size."""
        whole = node.get("whole")
        return Size(
            minibatch=node["minibatch"].integer(minimum=1),
            layers=tuple(Layer.from_json(layer) for layer in node["layers"].items()),
            tensors=tuple(Tensor.from_json(tensor) for tensor in node["tensors"].items()),
            whole_forward_s=whole["forward_s"].number() if whole else None,
            whole_backward_s=whole["backward_s"].number() if whole else None,
        )


def edges(tensors: Iterable[Tensor]) -> list[tuple[str, str]]:
    """The edges of the DAG as (producer, consumer), without repetition, in order of appearance."""
    return list(dict.fromkeys((tensor.producer, consumer) for tensor in tensors for consumer in tensor.consumers))


def _with_name_in_place(node: Node) -> Node:
    """A node of the same value whose error messages also quote the name of the layer or tensor."""
    name = node["name"].text()
    shown = repr(name) if len(name) <= 60 else repr(name[:57] + "…")
    return Node(node.value, f"{node.where} ({shown})")
