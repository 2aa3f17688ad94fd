"""The fields of a profile file as types, and the job behind a profile: its file, and what it lacks for training.

docs/file-formats.md describes the fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import asdict

from pipeplan.profile_data.layers import Layer, Provenance, SampleWork, Size, Tensor
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.util.typed import Amount, Bytes, Positive, json_fields
from pipeplan_launch.job_reference import JobFile, change_note, choice_note, file_of, job_file, relative_reference

PROFILE_FORMAT = "pipeplan-profile"
PROFILE_VERSION = 1
Granularity = Literal["module", "layer", "op"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
TrainingNeed = Literal["loss", "data"]
"""A field of a job that training needs, but profiling and planning do not."""
LEFT_OUT = "--no-self-check"
"""The reason why a profile was not self-checked if the option turned the self-check off."""


def unchecked_text(reason: str) -> str:
    """One line for the user of a profile whose model was not compared with plain training."""
    return f"not self-checked, whether stages train as the model alone does ({reason}); launch.sh checks it by itself"


def lacking_text(lacks: Sequence[TrainingNeed]) -> str:
    """The consequence of a missing loss or missing data, in one line."""
    missing = " and ".join(f"no {name}" for name in lacks)
    fields = ", ".join(f"{name}=..." for name in lacks)
    return (
        f"the job has {missing}, so that it can be planned, but launch.sh cannot train it: return Job(model, {fields}) "
        "and profile it again"
    )


def located_fields(ref: str, recorded: JobFile | None, folder: Path) -> dict[str, Any]:
    """The fields `ref` and `file` of a model, as a file in `folder` has them.

    If no file was recorded, `file` is left out and `ref` stays unchanged.
    """
    if recorded is None:
        return {"ref": ref}
    file = file_of(ref)
    current = replace(recorded, path=str(file)) if file is not None and file.is_file() else recorded
    return {"ref": relative_reference(ref, folder), "file": json_fields(current)}


def job_notes(ref: str, recorded: JobFile | None) -> Iterator[str]:
    """Remarks if the job's file is not the file that the profile recorded, or if its content has changed."""
    if file_of(ref) is None:
        return
    if note := choice_note(ref, recorded):
        yield note
    if note := change_note(ref, recorded, job_file(ref)):
        yield f"{note}, so its layers may take other times"


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
    elementwise: bool = True


class WholeFields(Struct):
    """The field `whole`: times of the whole model in one piece."""

    forward_s: Amount
    backward_s: Amount
    split_s: Amount | None = None


class SizeFields(Struct, kw_only=True):
    """One entry of `sizes`. The profile itself has the same fields for its own minibatch size."""

    minibatch: Positive
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    whole: WholeFields | None = None

    def record(self) -> Size:
        """The size that these fields describe."""
        whole = (self.whole.forward_s, self.whole.backward_s, self.whole.split_s) if self.whole else ()
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
        """The arguments of `Profile` for this file."""
        own, model = self.record(), asdict(self.model)
        shared = ("provenance", "together", "tied", "peak_bytes", "read_s", "work")
        return {
            **{name: getattr(own, name) for name in Size.__dataclass_fields__},
            **{f"model_{name}": model.pop(name) for name in ("ref", "name", "file")},
            **model,
            "optimizer_name": self.optimizer.name,
            "optimizer_state_ratio": self.optimizer.state_bytes_per_parameter_byte,
            "optimizer_elementwise": self.optimizer.elementwise,
            "step_s": self.optimizer.step_s,
            **{name: getattr(self, name) for name in shared},
            "sizes": tuple(size.record() for size in self.sizes),
        }
