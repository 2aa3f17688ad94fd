"""A profile: the layers of a model as a DAG, with the cost of each for one minibatch on one device.

docs/file-formats.md describes the file format field by field. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Layer, Provenance, SampleWork, Size, Tensor, edges
from pipeplan.profile_data.profile_document import (
    GRANULARITIES,
    PROFILE_FORMAT,
    PROFILE_VERSION,
    ProfileFields,
    TrainingNeed,
    located_fields,
)
from pipeplan.profile_data.rescale import size_at
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.util import files, graph
from pipeplan.util.files import json_text, read_document, write_text
from pipeplan.util.text import did_you_mean
from pipeplan.util.typed import decode, json_fields, settle_numbers
from pipeplan_launch.job_reference import JobFile as JobFile
from pipeplan_launch.job_reference import located_reference, portable_reference

LARGEST_MINIBATCH = 10**7


@dataclass(frozen=True)
class Profile:
    """A profile. `layers` is in topological order; `tensors` holds the edges of the DAG.

    Raises an `InputError` unless the layers form a DAG with unique names (`check_profile`).
    """

    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    minibatch: int
    """Samples in one minibatch."""
    model_ref: str = ""
    """The reference by which the executor loads the model: a bundled name, `/absolute/file.py:callable` or
    `package.module:callable`. In the profile's file, the path is relative to the file's folder."""
    model_name: str = ""
    graph_hash: str = ""
    """Hash of the traced graph; empty if the profile cannot be run (imported, modelled)."""
    dynamic_batch: bool = True
    """Whether the traced model accepts minibatches of any size."""
    granularity: str = "layer"
    """The part of the model that becomes one layer: `module`, `layer` or `op`. The executor uses the same value."""
    provenance: Provenance = field(default_factory=Provenance)
    optimizer_name: str = "SGD with momentum"
    optimizer_state_ratio: float = 1.0
    """Bytes of optimiser state per byte of parameters: 1 for SGD with momentum, 2 for Adam."""
    optimizer_elementwise: bool = True
    """Whether the optimiser treats every element separately, so that replicas may divide parameters (ZeRO-1)."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of layers that must share a stage, because of views of one storage or memory that is written in place."""
    tied: tuple[TiedWeights, ...] = ()
    """Weights that several layers share. Under a synchronous schedule these layers may be in different stages."""
    whole_forward_s: float | None = None
    """Forward time of the whole model in one piece; None if it was not measured."""
    whole_backward_s: float | None = None
    """Backward time of the whole model in one piece; None if it was not measured."""
    whole_split_s: float | None = None
    """Backward time of the whole model with a separate pass for weight gradients, as in zb-h1; None if not measured."""
    peak_bytes: int = 0
    """Peak memory of one forward and backward pass and update of the whole model, in bytes; 0 if it was not
    measured."""
    batch_norm: bool = False
    """Whether the model has BatchNorm, also inside of layers."""
    lacks: tuple[TrainingNeed, ...] = ()
    """Things that the job lacks: `loss` or `data`; empty if nothing is known to be missing. Without them a plan of
    the job cannot be trained."""
    work: SampleWork = field(default_factory=SampleWork)
    """FLOPs and tokens of a sample, and samples of an epoch, as far as they are known."""
    sizes: tuple[Size, ...] = ()
    """Other minibatch sizes that were measured in the same run."""
    step_s: float = 0.0
    """The part of an optimiser's step that does not depend on the parameters, in seconds. Each stage needs this time in
    addition to the `update_s` of its layers; 0 if `update_s` includes the whole step."""
    read_s: float = 0.0
    """Time in which the worker process reads the samples of one minibatch from the job's data, in seconds; 0 if the job
    has no data, or if other processes read them."""
    model_file: JobFile | None = None
    """The job's file at the time of writing, with a digest of its content; None for a bundled model, and in older
    profiles."""
    taken_whole: tuple[str, ...] = ()
    """Paths of submodules that are kept whole, because stages would train their parts differently from the model."""
    unchecked: str = ""
    """The reason why there was no self-check; empty if the check passed, and for profiles without one."""
    file: str = field(default="", compare=False)
    """Absolute path of the file that the profile was read from; empty if there is none. The file itself does not
    contain this path."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_profile(self)

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """Cache of values that other modules derive from this profile, by keys that they choose."""
        return {}

    @property
    def total_s(self) -> float:
        """Forward plus backward time of all layers, for one minibatch on one device."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    @property
    def all_sizes(self) -> list[Size]:
        """All measured minibatch sizes, including the profile's own, in increasing order."""
        whole = self.whole_forward_s, self.whole_backward_s, self.whole_split_s
        own = Size(self.minibatch, self.layers, self.tensors, *whole)
        return sorted([own, *self.sizes], key=lambda size: size.minibatch)

    @property
    def split_share(self) -> float:
        """Time that a separate pass for weight gradients adds, as a share of the backward pass; 0 if not measured."""
        if not self.whole_split_s or not self.whole_backward_s:
            return 0.0
        return max(0.0, self.whole_split_s / self.whole_backward_s - 1.0)

    @property
    def normalises_minibatches(self) -> bool:
        """Whether some layer's result for a sample depends on the other samples of its minibatch (BatchNorm)."""
        return self.batch_norm or any(layer.op.lower().startswith(("batchnorm", "batch_norm")) for layer in self.layers)

    def made_bytes(self) -> dict[str, int]:
        """Bytes of each layer's outputs that other layers read, for one minibatch."""
        made = {layer.name: 0 for layer in self.layers}
        for tensor in self.tensors:
            made[tensor.producer] += tensor.bytes
        return made

    def rescaled(self, minibatch: int, *, pessimistic: bool = False) -> Profile:
        """This profile for minibatches of `minibatch` samples, as measured at this size, otherwise interpolated.

        Times and activations change with the size; parameters and the optimiser's step stay the same
        (`pipeplan.profile_data.rescale`). With `pessimistic`, times that can only be extrapolated are upper bounds.
        Raises an `InputError` unless the size lies between 1 and `LARGEST_MINIBATCH`.
        """
        if not 1 <= minibatch <= LARGEST_MINIBATCH:
            raise InputError(f"the microbatch size must be at least 1 and at most {LARGEST_MINIBATCH}, not {minibatch}")
        if minibatch == self.minibatch:
            return self
        known = self.all_sizes
        size = size_at(known, minibatch, pessimistic=pessimistic)
        return replace(
            self,
            layers=size.layers,
            tensors=size.tensors,
            minibatch=minibatch,
            whole_forward_s=size.whole_forward_s,
            whole_backward_s=size.whole_backward_s,
            whole_split_s=size.whole_split_s,
            peak_bytes=0,
            read_s=self.read_s * minibatch / self.minibatch,
            sizes=tuple(size for size in known if size.minibatch != minibatch) if self.sizes else (),
        )

    def under_load(self, busy: int) -> Profile:
        """This profile with the times that layers take while `busy` workers of one machine compute at the same time.

        With one worker, the layers have the times without load. With `Provenance.load_processes` or more workers, they
        have the times under load. In between, the times are interpolated linearly. A profile without times under load
        is returned unchanged.
        """
        most = self.provenance.load_processes
        if busy < 2 or most < 2:
            return self
        return self._under_load(min(1.0, (busy - 1) / (most - 1)), min(busy, most))

    def without_load(self) -> Profile:
        """This profile with the times without load, and no times under load."""
        return self._under_load(0.0, self.provenance.processes)

    def _under_load(self, share: float, processes: int) -> Profile:
        def moved(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
            return tuple(layer.under_load(share) for layer in layers)

        layers = moved(self.layers)
        before_s, after_s = (sum(layer.update_s for layer in one) for one in (self.layers, layers))
        return replace(
            self,
            layers=layers,
            step_s=self.step_s * (after_s / before_s if before_s else 1.0),
            sizes=tuple(replace(size, layers=moved(size.layers)) for size in self.sizes),
            provenance=replace(self.provenance, processes=processes, load_processes=0),
        )

    def to_json(self) -> dict[str, Any]:
        """The document that `save` writes."""
        return {
            "format": PROFILE_FORMAT,
            "version": PROFILE_VERSION,
            "model": {
                "ref": self.model_ref,
                "name": self.model_name,
                **_present(file=self.model_file and json_fields(self.model_file)),
                "graph_hash": self.graph_hash,
                "dynamic_batch": self.dynamic_batch,
                "granularity": self.granularity,
                **_present(
                    batch_norm=self.batch_norm,
                    lacks=list(self.lacks),
                    taken_whole=list(self.taken_whole),
                    unchecked=self.unchecked,
                ),
            },
            "minibatch": self.minibatch,
            "provenance": self.provenance.to_json(),
            "optimizer": {
                "name": self.optimizer_name,
                "state_bytes_per_parameter_byte": self.optimizer_state_ratio,
                **_present(step_s=self.step_s),
                **({} if self.optimizer_elementwise else {"elementwise": False}),
            },
            "peak_bytes": self.peak_bytes,
            **_present(read_s=self.read_s),
            **_measured_fields(self),
            "together": [list(group) for group in self.together],
            **_present(
                tied=list(map(json_fields, self.tied)), work=self.work != SampleWork() and json_fields(self.work)
            ),
            "sizes": [{"minibatch": size.minibatch, **_measured_fields(size)} for size in self.sizes],
        }

    def digest(self) -> str:
        """A SHA-256 hash of all fields. A plan identifies its profile by this hash.

        The folder of a job whose content is known is left out, so that a project can be moved.
        """
        document = self.to_json()
        if self.model_file is not None:
            document["model"] |= {"ref": portable_reference(self.model_ref), "file": self.model_file.digest}
        text = json.dumps(document, sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file by atomic replace."""
        write_text(Path(path), self.text_for(Path(path)))

    def text_for(self, path: Path) -> str:
        """The text of the profile's file at this path, with the job's path relative to the file's folder."""
        document = self.to_json()
        document["model"] |= located_fields(self.model_ref, self.model_file, Path(os.path.realpath(path)).parent)
        return json_text(document)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read and check a profile. Raises an `InputError` that names the file and the wrong field."""
        root = read_document(Path(path), PROFILE_FORMAT, PROFILE_VERSION)
        with root.locating_errors():
            arguments = decode(root, ProfileFields).arguments()
            if arguments["model_file"] is not None:
                folder = Path(os.path.realpath(path)).parent
                arguments["model_ref"] = located_reference(arguments["model_ref"], arguments["model_file"], folder)
            return Profile(**arguments, file=os.path.abspath(path))


def bundled_profile_paths() -> dict[str, Path]:
    """The paths of the bundled profiles, by name."""
    return {path.stem: path for path in sorted(files.bundled_folder("profiles").glob("*.json"))}


def load_profile(name: str) -> Profile:
    """The profile in the file `name`, otherwise the bundled profile of that name.

    Raises an `InputError` if there is neither, or if the file is not a valid profile.
    """
    path = Path(name)
    if path.suffix == ".py" or ".py:" in name:
        job = name if ":" in name else f"{name}:build"
        raise InputError(f"{name} is a job, not a profile: measure it first, with pipeplan profile {job}")
    if path.suffix == ".toml" and path.is_file():
        raise InputError(f"{name} is not a profile, which ends in .json: a cluster file goes with --cluster")
    if path.is_file():
        return Profile.load(path)
    if name in bundled_profile_paths():
        return replace(Profile.load(bundled_profile_paths()[name]), file="")  # its name finds it on any machine
    if path.suffix == ".json" or len(path.parts) > 1 or path.exists():
        return Profile.load(path)
    raise InputError(f"there is no profile {name!r}; {did_you_mean(name, bundled_profile_paths())} (or give a file)")


def check_profile(profile: Profile) -> None:
    """Raise an `InputError` unless the profile is a DAG of at least one layer, with unique and consistent names."""
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
    groups = [*(("together", group) for group in profile.together), *(("tied", tie.layers) for tie in profile.tied)]
    for where, name in ((where, name) for where, group in groups for name in group):
        if name not in known:
            raise InputError(f"`{where}` names a layer that does not exist: {name!r}")
    _check_ties(profile)
    cycle = graph.find_cycle(names, edges(profile.tensors))
    if cycle:
        raise InputError(f"the layers form a cycle: {' → '.join(cycle)}")
    if profile.granularity not in GRANULARITIES:
        raise InputError(f"the granularity {profile.granularity!r} is not one of {', '.join(GRANULARITIES)}")
    counts = [profile.minibatch, *(size.minibatch for size in profile.sizes)]
    if len(set(counts)) < len(counts):
        raise InputError(f"a microbatch size appears twice: {', '.join(map(str, counts))}")
    for size in profile.sizes:
        for what in ("layers", "tensors"):
            if [one.name for one in getattr(size, what)] != [one.name for one in getattr(profile, what)]:
                at = f"at microbatch {size.minibatch} differ from those at microbatch {profile.minibatch}"
                raise InputError(f"the {what} {at}")


def _check_ties(profile: Profile) -> None:
    parameters = {layer.name: layer.parameter_bytes for layer in profile.layers}
    charged: Counter[str] = Counter()
    for tie in profile.tied:
        if len(set(tie.layers)) < max(2, len(tie.layers)):
            raise InputError(f"`tied` needs two or more layers that differ, not {', '.join(tie.layers) or 'none'}")
        charged[tie.layers[0]] += tie.bytes
    for name, size in charged.items():
        if size > parameters[name]:
            raise InputError(
                f"`tied` says that {size} bytes of the parameters of {name!r} are shared, and it has {parameters[name]}"
            )


def _present(**fields: Any) -> dict[str, Any]:
    """The fields that a file contains: those that are not empty, zero or false."""
    return {name: value for name, value in fields.items() if value}


def _measured_fields(size: Profile | Size) -> dict[str, Any]:
    """The JSON fields that a profile has for its own minibatch size and for every further size."""
    whole = None
    if size.whole_forward_s is not None and size.whole_backward_s is not None:
        whole = {"forward_s": size.whole_forward_s, "backward_s": size.whole_backward_s}
        if size.whole_split_s is not None:
            whole["split_s"] = size.whole_split_s
    return {
        "whole": whole,
        "layers": [layer.to_json() for layer in size.layers],
        "tensors": [json_fields(tensor) for tensor in size.tensors],
    }


def _check_unique(what: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"the {what} {name!r} appears {count} times")
