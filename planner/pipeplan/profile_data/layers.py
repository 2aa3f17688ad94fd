"""The records of a profile: layers, the tensors between them, further minibatch sizes, and provenance.

docs/file-formats.md describes the profile file field by field. Times are seconds and sizes are bytes, each for one
minibatch on one device. The types state what a file may hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from pipeplan.util.typed import Amount, Bytes, Natural, Positive, json_fields, settle_numbers

TIMES = ("forward_s", "backward_s", "update_s")
LOADED_TIMES = tuple(f"loaded_{name}" for name in TIMES)
"""Fields of a layer with times under load (all cores busy), in the order of `TIMES`, the times without load."""


@dataclass(frozen=True)
class Layer:
    """One layer, measured for one minibatch."""

    name: str
    """Name of the layer, unique in the profile. Stage files refer to layers by this name."""
    forward_s: Amount
    """Median time of the forward pass."""
    backward_s: Amount
    """Median time of the backward pass."""
    parameter_bytes: Bytes
    """Bytes of the parameters that are trained."""
    saved_bytes: Bytes
    """Bytes kept from the forward pass until the backward pass."""
    module: str = ""
    """Path of the module in the model, empty for a free operator."""
    op: str = ""
    """Description of the operation, for people."""
    forward_spread_s: Amount = 0.0
    """Interquartile range of the measured forward times."""
    backward_spread_s: Amount = 0.0
    """Interquartile range of the measured backward times."""
    buffer_bytes: Bytes = 0
    """Bytes of state that is not trained: frozen weights, and buffers such as running statistics."""
    update_s: Amount = 0.0
    """Median time of the optimiser's step over the layer's parameters."""
    workspace_bytes: Bytes = 0
    """Peak bytes of temporary memory while the layer runs, beyond its inputs, its outputs and the tensors that it saves
    for the backward pass; 0 if unknown."""
    like: str = ""
    """Name of an equivalent layer that was measured instead; empty if this layer was measured."""
    loaded_forward_s: Amount = 0.0
    """Median time of the forward pass with all cores busy (`Provenance.load_processes`); 0 if not measured."""
    loaded_backward_s: Amount = 0.0
    """Median time of the backward pass with all cores busy; 0 if it was not measured."""
    loaded_update_s: Amount = 0.0
    """Median time of the optimiser's step with all cores busy; 0 if it was not measured."""
    frozen_bytes: Bytes = 0
    """The part of `buffer_bytes` that frozen weights take."""

    def __post_init__(self) -> None:
        settle_numbers(self)

    def under_load(self, share: float) -> Layer:
        """The layer with times between those without load (`share` 0) and with all cores busy (`share` 1).

        The result has no separate times under load."""
        changed: dict[str, Any] = dict.fromkeys(LOADED_TIMES, 0.0)
        for name in TIMES:
            changed[name] = (1 - share) * getattr(self, name) + share * getattr(self, f"loaded_{name}")
        return replace(self, **changed)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, trained or frozen."""
        return self.parameter_bytes + self.frozen_bytes

    def to_json(self) -> dict[str, Any]:
        """All fields; times under load only if there are any."""
        loaded = any(getattr(self, name) for name in LOADED_TIMES)
        return json_fields(self, "frozen_bytes", *(() if loaded else LOADED_TIMES))


@dataclass(frozen=True)
class Tensor:
    """An output of a layer that other layers read.

    The tensor crosses a cut once, even if several consumers lie behind the cut.
    """

    name: str
    producer: str
    """Name of the layer that computes the tensor."""
    consumers: tuple[str, ...]
    """Names of the layers that read the tensor."""
    bytes: Bytes
    """Bytes for one minibatch, sent forward."""
    gradient_bytes: Bytes
    """Bytes of the tensor's gradient, sent backward; 0 for integers and for tensors that need no gradient."""

    def __post_init__(self) -> None:
        settle_numbers(self)


@dataclass(frozen=True)
class Provenance:
    """The origin of a profile's figures: device, method, versions, and remarks."""

    kind: str = "measured"
    """Kind of origin: `measured`, `modelled`, `imported` or `calibrated`."""
    device: str = ""
    """Kind of device: `cpu` or `cuda`."""
    device_name: str = ""
    """The model of the device, such as `Tesla V100-SXM2-16GB`."""
    when: str = ""
    """UTC time of the measurement, in ISO 8601."""
    how: str = ""
    """The method of measurement or estimation, in words."""
    torch: str = ""
    """Version of torch."""
    pipeplan: str = ""
    """Version of pipeplan."""
    threads: Natural = 0
    """Number of threads of each measuring process."""
    warmup: Natural = 0
    """Number of passes that were run before the measured passes."""
    repeats: Natural = 0
    """Number of measured passes of each layer."""
    traced: str = ""
    """The method by which the model was traced into layers."""
    processes: Positive = 1
    """Number of workers of one machine that compute at the same time. The times are measured under this load."""
    notes: tuple[str, ...] = ()
    """Remarks on the figures for the reader: drift, spread, corrections, errors."""
    load_processes: Natural = 0
    """Number of busy processes, one for each core, while times under load were measured; 0 without times under load."""
    incomplete: str = ""
    """The work that the times leave out, in words; empty if they are complete. Every answer from the profile begins
    with this text."""

    def to_json(self) -> dict[str, Any]:
        """All fields; the load and `incomplete` only if they are set."""
        return json_fields(self, "load_processes", "incomplete")

    @property
    def warning(self) -> str:
        """The first line of every answer from an incomplete profile; empty if the profile is complete."""
        return f"INCOMPLETE, all times are too short and all rates too high: {self.incomplete}" * bool(self.incomplete)


@dataclass(frozen=True)
class Size:
    """The layers and tensors of a profile at one measured minibatch size, in the order of the profile."""

    minibatch: Positive
    """Samples in one minibatch."""
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    whole_forward_s: Amount | None = None
    """Forward time of the whole model in one piece; None if it was not measured."""
    whole_backward_s: Amount | None = None
    """Backward time of the whole model in one piece; None if it was not measured."""
    whole_split_s: Amount | None = None
    """Backward time of the whole model with a separate pass for weight gradients, as in zb-h1; None if not measured."""

    def __post_init__(self) -> None:
        settle_numbers(self)


def edges(tensors: Iterable[Tensor]) -> list[tuple[str, str]]:
    """The edges of the DAG as (producer, consumer), without repetition, in order of appearance."""
    return list(dict.fromkeys((tensor.producer, consumer) for tensor in tensors for consumer in tensor.consumers))


@dataclass(frozen=True)
class SampleFlops:
    """FLOPs of one kind of operator for one sample, two for each multiply-add, without any recomputation."""

    kind: str
    """Kind of operator, one of `pipeplan.cluster_data.devices.OPERATOR_KINDS`."""
    arithmetic: str
    """The number format that the operator computes in, one of `pipeplan.cluster_data.devices.ARITHMETICS`."""
    forward: Amount
    backward: Amount

    def __post_init__(self) -> None:
        settle_numbers(self)


@dataclass(frozen=True)
class SampleWork:
    """The work of one sample, and the size of an epoch. Unknown figures keep their defaults."""

    flops: tuple[SampleFlops, ...] = ()
    """FLOPs by kind of operator; empty if they were not counted, or if opaque layers make them unknown."""
    tokens_per_sample: Natural = 0
    """Number of tokens in a sample, as the job states it; 0 if the job does not."""
    dataset_size: Natural = 0
    """Number of training samples in an epoch of the job's data; 0 if the job has no data."""
