"""The records that a profile consists of: layers, the tensors between them, further minibatch sizes, and provenance.

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
"""Fields of a layer: its times alone, and the same times with all cores busy."""


@dataclass(frozen=True)
class Layer:
    """One layer, measured for one minibatch."""

    name: str
    """Unique in the profile. The stage files refer to layers by this name."""
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
    """The operation, as text for people."""
    forward_spread_s: Amount = 0.0
    """Interquartile range of the measured forward times."""
    backward_spread_s: Amount = 0.0
    """Interquartile range of the measured backward times."""
    buffer_bytes: Bytes = 0
    """Bytes of state that is not trained: frozen weights, and buffers such as running statistics."""
    update_s: Amount = 0.0
    """Median time of the optimiser's step over the layer's parameters."""
    workspace_bytes: Bytes = 0
    """Peak of the memory that the layer allocates temporarily while it runs, beyond its inputs, its outputs and what it
    saves for the backward pass; 0 where it is not known."""
    like: str = ""
    """Name of the layer that was measured in place of this one because both compute the same; empty where this layer
    was measured itself."""
    loaded_forward_s: Amount = 0.0
    """Median time of the forward pass with all cores busy (`Provenance.load_processes`); 0 where that was not
    measured."""
    loaded_backward_s: Amount = 0.0
    """The time of the backward pass with all cores busy."""
    loaded_update_s: Amount = 0.0
    """The time of the optimiser's step with all cores busy."""
    frozen_bytes: Bytes = 0
    """Of `buffer_bytes`, those of frozen weights."""

    def __post_init__(self) -> None:
        settle_numbers(self)

    def under_load(self, share: float) -> Layer:
        """The layer with times between those alone (`share` 0) and those with all cores busy (1), and no others."""
        changed: dict[str, Any] = dict.fromkeys(LOADED_TIMES, 0.0)
        for name in TIMES:
            changed[name] = (1 - share) * getattr(self, name) + share * getattr(self, f"loaded_{name}")
        return replace(self, **changed)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, trained or frozen."""
        return self.parameter_bytes + self.frozen_bytes

    def to_json(self) -> dict[str, Any]:
        """All fields, without the times under load where there are none."""
        loaded = any(getattr(self, name) for name in LOADED_TIMES)
        return json_fields(self, "frozen_bytes", *(() if loaded else LOADED_TIMES))


@dataclass(frozen=True)
class Tensor:
    """An output of a layer that other layers read. It crosses a cut once, however many consumers lie behind the cut."""

    name: str
    producer: str
    """Name of the layer that computes it."""
    consumers: tuple[str, ...]
    """Names of the layers that read it."""
    bytes: Bytes
    """Size for one minibatch, sent forward."""
    gradient_bytes: Bytes
    """Size of its gradient, sent backward: 0 for integers and for tensors that need no gradient."""

    def __post_init__(self) -> None:
        settle_numbers(self)


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
    threads: Natural = 0
    """Threads of each measuring process."""
    warmup: Natural = 0
    """Passes that were run before the measured ones."""
    repeats: Natural = 0
    """Measured passes of each layer."""
    traced: str = ""
    """The method by which the model was traced into layers."""
    processes: Positive = 1
    """Number of workers of one machine that compute at the same time; the times are those under that load."""
    notes: tuple[str, ...] = ()
    """Remarks on the figures for the reader: drift, spread, corrections, errors."""
    load_processes: Natural = 0
    """Number of processes, one for each core, that were busy while the layers' times under load were measured; 0 where
    there are no such times."""
    incomplete: str = ""
    """The work that the times leave out, as text for people; empty if they are complete. Every answer from the profile
    begins with it."""

    def to_json(self) -> dict[str, Any]:
        """All fields, without the load where there was none, and without `incomplete` where nothing is left out."""
        return json_fields(self, "load_processes", "incomplete")

    @property
    def warning(self) -> str:
        """The first line of every answer from an incomplete profile; empty if the profile is complete."""
        return f"INCOMPLETE, all times are too short and all rates too high: {self.incomplete}" * bool(self.incomplete)


@dataclass(frozen=True)
class Size:
    """The layers and tensors of a profile as measured at one minibatch size, in the order of the profile."""

    minibatch: Positive
    """Samples in one minibatch."""
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    whole_forward_s: Amount | None = None
    """Forward time of the whole model in one piece; None where it was not measured."""
    whole_backward_s: Amount | None = None
    """Backward time of the whole model in one piece; None where it was not measured."""
    whole_split_s: Amount | None = None
    """The same where gradients of weights have a pass of their own, as in zb-h1; None where it was not measured."""

    def __post_init__(self) -> None:
        settle_numbers(self)


def edges(tensors: Iterable[Tensor]) -> list[tuple[str, str]]:
    """The edges of the DAG as (producer, consumer), without repetition, in order of appearance."""
    return list(dict.fromkeys((tensor.producer, consumer) for tensor in tensors for consumer in tensor.consumers))


@dataclass(frozen=True)
class SampleFlops:
    """FLOPs of one kind of operator for one sample, two for each multiply-add, without any recomputation."""

    kind: str
    """One of `pipeplan.cluster_data.devices.OPERATOR_KINDS`."""
    arithmetic: str
    """The type that the operator computes in, one of `pipeplan.cluster_data.devices.ARITHMETICS`."""
    forward: Amount
    backward: Amount

    def __post_init__(self) -> None:
        settle_numbers(self)


@dataclass(frozen=True)
class SampleWork:
    """The work of one sample, and the size of an epoch. Figures that are not known keep their defaults."""

    flops: tuple[SampleFlops, ...] = ()
    """Empty where they were not counted, or some layers are opaque so that their FLOPs are not known."""
    tokens_per_sample: Natural = 0
    """Tokens in a sample, as the job states them; 0 where it does not."""
    dataset_size: Natural = 0
    """Training samples in an epoch of the job's data; 0 where the job has no data."""
