"""Measurements of a model in the form that a profile stores: layers, tensors and sizes."""

from __future__ import annotations

import platform
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.layers import Tensor as Edge
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.profile_data.training_needs import TrainingNeed
from pipeplan.profiler.clock import Aim, Samples, interquartile_range, median
from pipeplan.profiler.optimizer_step import StepCost
from pipeplan.profiler.overhead import Overhead
from pipeplan_launch.job.job import Job
from pipeplan_launch.tracing.trace import TracedModel


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
    """For each layer that was not measured, the measured layer that is the same computation."""
    overhead: Overhead
    warmed: int
    """Number of passes before the measured ones."""
    workspaces: dict[str, int]
    """Workspace in bytes, by layer that was run."""
    waits: bool
    """Whether the times include waiting for a core."""
    loaded: Samples | None = None
    """Times with all cores busy; None where they were not measured."""

    @property
    def forward_s(self) -> float:
        """Median time of the whole model's forward pass."""
        return median(self.samples.whole_forward)

    def size(self, steps: StepCost) -> Size:
        """The size as the profile stores it. The optimiser's time is the same for every size."""
        return Size(
            minibatch=self.minibatch,
            layers=measured_layers(self, steps),
            tensors=boundary_tensors(self.traced, self.minibatch),
            whole_forward_s=self.forward_s,
            whole_backward_s=median(self.samples.whole_backward),
        )


def measured_layers(measured: MeasuredSize, steps: StepCost) -> tuple[Layer, ...]:
    """The layers with their measured times and sizes."""
    traced, samples, loaded = measured.traced, measured.samples, measured.loaded
    parameters, buffers = charged_parameters(traced), traced.buffers_by_name()
    sizes = {name: parameter.nbytes for name, parameter in traced.parameters_by_name().items()}
    forward_factor = waiting_factor(samples, samples.forward) if measured.waits else 1.0
    backward_factor = waiting_factor(samples, samples.backward) if measured.waits else 1.0
    layers = []
    for info in traced.layers:
        ran = measured.alike.get(info.name, info.name)
        update_s = steps.update_s.get(info.name, 0.0)
        layers.append(
            Layer(
                name=info.name,
                module=info.module,
                op=info.op,
                forward_s=median(samples.forward[ran]) * forward_factor,
                backward_s=median(samples.backward[ran]) * backward_factor,
                forward_spread_s=interquartile_range(samples.forward[ran]),
                backward_spread_s=interquartile_range(samples.backward[ran]),
                parameter_bytes=sum(sizes[name] for name in parameters[info.name]),
                buffer_bytes=sum(buffers[name].nbytes for name in info.buffers),
                saved_bytes=measured.saved_bytes.get(info.name, 0),
                update_s=update_s,
                workspace_bytes=measured.workspaces.get(ran, 0),
                like="" if ran == info.name else ran,
                loaded_forward_s=0.0 if loaded is None else median(loaded.forward[ran]),
                loaded_backward_s=0.0 if loaded is None else median(loaded.backward[ran]),
                loaded_update_s=0.0 if loaded is None else update_s * steps.loaded,
            )
        )
    return tuple(layers)


def charged_parameters(traced: TracedModel) -> dict[str, tuple[str, ...]]:
    """Names of the parameters that each layer is charged for.

    The first of the layers that read a tied parameter is charged for it. What a copy in another stage takes follows
    from `tied_weights`.
    """
    charged: set[str] = set()
    own = {}
    for info in traced.layers:
        own[info.name] = tuple(name for name in info.parameters if name not in charged)
        charged.update(own[info.name])
    return own


def training_lacks(job: Job) -> tuple[TrainingNeed, ...]:
    """The needs of training that the job lacks."""
    missing: list[TrainingNeed] = []
    if job.loss is None:
        missing.append("loss")
    if job.data is None:
        missing.append("data")
    return tuple(missing)


def tied_weights(traced: TracedModel) -> tuple[TiedWeights, ...]:
    """The weights that several layers share, each by all its names in the model."""
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, first in traced.state_names.items():
        names_of[first].append(name)
    sizes = {name: parameter.nbytes for name, parameter in traced.model.named_parameters()}
    return tuple(
        TiedWeights(
            tuple(" = ".join(names_of[name]) for name in tie.names), tie.layers, sum(map(sizes.__getitem__, tie.names))
        )
        for tie in traced.tied
    )


def has_batch_norm(traced: TracedModel) -> bool:
    """Whether the model has BatchNorm, whose result for a sample depends on the other samples of its minibatch."""
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in traced.model.modules())


def waiting_factor(samples: Samples, times: dict[str, list[float]]) -> float:
    """Median time of a pass, divided by the sum of the median times of its layers.

    A short layer rarely has to wait for a core, so its median does not include such waits. A pass is long enough that
    its median does. Multiplying each layer's time by this factor spreads the waits in proportion to the layers' times.
    """
    layers_s = sum(samples.weights.get(name, 1) * median(layer_times) for name, layer_times in times.items())
    return median(samples.totals(times)) / layers_s if layers_s > 0 else 1.0


def boundary_tensors(traced: TracedModel, minibatch: int) -> tuple[Edge, ...]:
    """The tensors between layers, with their bytes at a minibatch size."""
    return tuple(
        Edge(
            name=spec.name,
            producer=spec.producer,
            consumers=spec.consumers,
            bytes=spec.bytes(minibatch),
            gradient_bytes=spec.bytes(minibatch) if spec.requires_grad else 0,
        )
        for spec in traced.tensors
    )


def cpu_name() -> str:
    """The processor's name, or the machine's architecture if the system does not know the name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
