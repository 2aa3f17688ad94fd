"""The fields of a profile file, as its types state them; docs/file-formats.md describes them."""

from __future__ import annotations

from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import asdict

from pipeplan.profile_data.layers import Layer, Provenance, SampleWork, Size, Tensor
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.profile_data.training_needs import TrainingNeed
from pipeplan.util.typed import Amount, Bytes, Positive
from pipeplan_launch.job_reference import JobFile

PROFILE_FORMAT = "pipeplan-profile"
PROFILE_VERSION = 1
Granularity = Literal["module", "layer", "op"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)


class ModelFields(Struct):
    """The field `model`."""

    ref: str
    name: str
    graph_hash: str
    dynamic_batch: bool
    granularity: Granularity = "layer"
    file: JobFile | None = None
    batch_norm: bool = False
    lacks: tuple[TrainingNeed, ...] = ()
    taken_whole: tuple[str, ...] = ()
    unchecked: str = ""


class OptimizerFields(Struct):
    """The field `optimizer`."""

    name: str
    state_bytes_per_parameter_byte: Amount
    step_s: Amount = 0.0


class WholeFields(Struct):
    """The field `whole`: times of the whole model in one piece."""

    forward_s: Amount
    backward_s: Amount


class SizeFields(Struct, kw_only=True):
    """One entry of `sizes`. The profile itself has the same fields for its own minibatch size."""

    minibatch: Positive
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    whole: WholeFields | None = None

    def record(self) -> Size:
        """The size that these fields describe."""
        whole = (self.whole.forward_s, self.whole.backward_s) if self.whole else (None, None)
        return Size(self.minibatch, self.layers, self.tensors, *whole)


class ProfileFields(SizeFields, kw_only=True):
    """A profile file."""

    format: Literal["pipeplan-profile"]
    version: Literal[1]
    model: ModelFields
    provenance: Provenance
    optimizer: OptimizerFields
    together: tuple[tuple[str, ...], ...]
    tied: tuple[TiedWeights, ...] = ()
    peak_bytes: Bytes = 0
    read_s: Amount = 0.0
    work: SampleWork = SampleWork()
    sizes: tuple[SizeFields, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """The arguments by which a `Profile` is made."""
        own, model = self.record(), asdict(self.model)
        shared = ("provenance", "together", "tied", "peak_bytes", "read_s", "work")
        return {
            **{name: getattr(own, name) for name in Size.__dataclass_fields__},
            **{f"model_{name}": model.pop(name) for name in ("ref", "name", "file")},
            **model,
            "optimizer_name": self.optimizer.name,
            "optimizer_state_ratio": self.optimizer.state_bytes_per_parameter_byte,
            "step_s": self.optimizer.step_s,
            **{name: getattr(self, name) for name in shared},
            "sizes": tuple(size.record() for size in self.sizes),
        }
