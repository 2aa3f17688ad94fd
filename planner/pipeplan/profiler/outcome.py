"""Converts measurements of a model to the form that a profile stores. Estimates use some of the same fields."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from pipeplan._version import __version__
from pipeplan.profile_data.layers import Layer, Provenance, Size
from pipeplan.profile_data.layers import Tensor as Edge
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.profile_document import TrainingNeed
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.profiler.clock import Aim, Samples, interquartile_range
from pipeplan.profiler.optimizer_step import StepCost, optimizer_state
from pipeplan.profiler.overhead import Overhead
from pipeplan.util.text import utc_now
from pipeplan_launch.job.job import Job
from pipeplan_launch.job_reference import canonical_reference, job_file
from pipeplan_launch.tracing.layers import LayerInfo
from pipeplan_launch.tracing.trace import TensorSpec, TracedModel


@dataclass(frozen=True)
class MeasuredSize:
    """Measurements of a model at one minibatch size."""

    traced: TracedModel
    minibatch: int
    samples: Samples
    aim: Aim
    saved_bytes: dict[str, int]
    """Bytes that autograd saves for backward, by layer."""
    alike: dict[str, str]
    """For each layer that was not measured: the measured layer with the same computation."""
    overhead: Overhead
    warmed: int
    """Number of passes before the measured passes."""
    workspaces: dict[str, int]
    """Workspace in bytes, by layer that was run."""
    loaded: Samples | None = None
    """Times with all cores busy; None if they were not measured."""

    def size(self, steps: StepCost) -> Size:
        """The size as the profile stores it. The optimiser's time is the same for every size."""
        return Size(
            minibatch=self.minibatch,
            layers=measured_layers(self, steps),
            tensors=boundary_tensors(self.traced, lambda spec: spec.bytes(self.minibatch)),
            whole_forward_s=median(self.samples.whole_forward),
            whole_backward_s=median(self.samples.whole_backward),
            whole_split_s=median(self.samples.whole_split) if self.samples.whole_split else None,
        )


def measured_layers(measured: MeasuredSize, steps: StepCost) -> tuple[Layer, ...]:
    """The layers with their measured times and sizes."""
    samples, loaded = measured.samples, measured.loaded
    layers = []
    for info, fields in layer_fields(measured.traced, measured.saved_bytes):
        ran = measured.alike.get(info.name, info.name)
        update_s = steps.update_s.get(info.name, 0.0)
        layers.append(
            Layer(
                **fields,
                forward_s=median(samples.forward[ran]),
                backward_s=median(samples.backward[ran]),
                forward_spread_s=interquartile_range(samples.forward[ran]),
                backward_spread_s=interquartile_range(samples.backward[ran]),
                update_s=update_s,
                workspace_bytes=measured.workspaces.get(ran, 0),
                like="" if ran == info.name else ran,
                loaded_forward_s=0.0 if loaded is None else median(loaded.forward[ran]),
                loaded_backward_s=0.0 if loaded is None else median(loaded.backward[ran]),
                loaded_update_s=0.0 if loaded is None else update_s * steps.loaded,
            )
        )
    return tuple(layers)


def layer_fields(traced: TracedModel, saved_bytes: Mapping[str, int]) -> Iterator[tuple[LayerInfo, dict[str, Any]]]:
    """Every layer, with the fields of its record that do not depend on times."""
    own, buffers, parameters = charged_parameters(traced), traced.buffers_by_name(), traced.parameters_by_name()
    for info in traced.layers:
        frozen = sum(parameters[name].nbytes for name in info.parameters if not parameters[name].requires_grad)
        yield (
            info,
            {
                "name": info.name,
                "module": info.module,
                "op": info.op,
                "parameter_bytes": sum(parameters[name].nbytes for name in own[info.name]),
                "buffer_bytes": frozen + sum(buffers[name].nbytes for name in info.buffers),
                "frozen_bytes": frozen,
                "saved_bytes": saved_bytes.get(info.name, 0),
            },
        )


def charged_parameters(traced: TracedModel) -> dict[str, tuple[str, ...]]:
    """Names of the trained parameters that count for each layer.

    A tied parameter counts for the first layer that reads it. `tied_weights` has the cost of a copy in another stage.
    Frozen parameters count for every layer that reads them, like buffers.
    """
    charged = {name for name, parameter in traced.parameters_by_name().items() if not parameter.requires_grad}
    own = {}
    for info in traced.layers:
        own[info.name] = tuple(name for name in info.parameters if name not in charged)
        charged.update(own[info.name])
    return own


def training_lacks(job: Job) -> tuple[TrainingNeed, ...]:
    """The inputs of training that the job lacks: a loss, data."""
    needs: tuple[TrainingNeed, ...] = ("loss", "data")
    return tuple(need for need in needs if getattr(job, need) is None)


def all_names(traced: TracedModel) -> dict[str, list[str]]:
    """All names of each parameter and buffer in the model, by its first name."""
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, first in traced.state_names.items():
        names_of[first].append(name)
    return names_of


def tied_weights(traced: TracedModel) -> tuple[TiedWeights, ...]:
    """The weights that several layers share, each with all its names in the model."""
    names_of = all_names(traced)
    sizes = {name: parameter.nbytes for name, parameter in traced.model.named_parameters()}
    return tuple(
        TiedWeights(
            tuple(" = ".join(names_of[name]) for name in tie.names), tie.layers, sum(map(sizes.__getitem__, tie.names))
        )
        for tie in traced.tied
    )


def has_batch_norm(traced: TracedModel) -> bool:
    """Whether the model has BatchNorm. Its result for a sample depends on the other samples of the minibatch."""
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in traced.model.modules())


def boundary_tensors(traced: TracedModel, size_of: Callable[[TensorSpec], int]) -> tuple[Edge, ...]:
    """The tensors between layers, each with its bytes by `size_of`."""
    return tuple(
        Edge(spec.name, spec.producer, spec.consumers, size_of(spec), size_of(spec) if spec.requires_grad else 0)
        for spec in traced.tensors
    )


def profile_from(
    ref: str,
    job: Job,
    traced: TracedModel,
    granularity: str,
    sizes: Sequence[Size],
    provenance: Mapping[str, Any],
    **measured: Any,
) -> Profile:
    """The profile of the model that `ref` names, with the first of `sizes` as its own.

    `provenance`: fields that say how the profile was made. `measured`: fields that only some profiles have.
    """
    optimizer = optimizer_state(job)
    first, *others = sizes
    return Profile(
        layers=first.layers,
        tensors=first.tensors,
        minibatch=first.minibatch,
        model_ref=canonical_reference(ref),
        model_file=job_file(ref),
        model_name=job.name,
        dynamic_batch=traced.dynamic_batch,
        granularity=granularity,
        provenance=Provenance(
            when=utc_now(), torch=torch.__version__, pipeplan=__version__, traced=traced.how, **provenance
        ),
        optimizer_name=optimizer.name,
        optimizer_state_ratio=optimizer.ratio,
        optimizer_elementwise=optimizer.elementwise,
        together=traced.together,
        tied=tied_weights(traced),
        batch_norm=has_batch_norm(traced),
        lacks=training_lacks(job),
        sizes=tuple(others),
        **measured,
    )
