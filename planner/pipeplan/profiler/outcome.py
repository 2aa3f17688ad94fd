"""What was measured, in the terms of a profile."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.layers import Tensor as Edge
from pipeplan.profiler.clock import Overhead, median, spread
from pipeplan.profiler.passes import Samples
from pipeplan_launch.tracing.trace import TracedModel


@dataclass(frozen=True)
class Measured:
    """A model at one minibatch size."""

    traced: TracedModel
    minibatch: int
    samples: Samples
    saved_bytes: dict[str, int]
    """By layer."""
    alike: dict[str, str]
    """For each layer that was not measured the one that was in its place."""
    overhead: Overhead
    warmed: int
    """Passes before those that count."""
    workspaces: dict[str, int]
    """By layer, of those that were run."""
    waits: bool
    """Whether the times hold what was spent waiting for a core."""

    def size(self, update_s: Mapping[str, float]) -> Size:
        """As the profile writes it, with the optimiser's time by layer, which depends on no minibatch size."""
        return Size(
            minibatch=self.minibatch,
            layers=layers_of(self, update_s),
            tensors=edges_of(self.traced, self.minibatch),
            whole_forward_s=median(self.samples.whole_forward),
            whole_backward_s=median(self.samples.whole_backward),
        )


def layers_of(found: Measured, update_s: Mapping[str, float]) -> tuple[Layer, ...]:
    """The layers with what was measured of them."""
    traced, samples = found.traced, found.samples
    parameters, buffers = own_parameters(traced), dict(traced.model.named_buffers())
    sizes = {name: one.nbytes for name, one in traced.model.named_parameters()}
    forward = waiting(samples, samples.forward) if found.waits else 1.0
    backward = waiting(samples, samples.backward) if found.waits else 1.0
    layers = []
    for info in traced.layers:
        ran = found.alike.get(info.name, info.name)
        layers.append(
            Layer(
                name=info.name,
                module=info.module,
                op=info.op,
                forward_s=median(samples.forward[ran]) * forward,
                backward_s=median(samples.backward[ran]) * backward,
                forward_spread_s=spread(samples.forward[ran]),
                backward_spread_s=spread(samples.backward[ran]),
                parameter_bytes=sum(sizes[name] for name in parameters[info.name]),
                buffer_bytes=sum(buffers[name].nbytes for name in info.buffers),
                saved_bytes=found.saved_bytes.get(info.name, 0),
                update_s=update_s.get(info.name, 0.0),
                workspace_bytes=found.workspaces.get(ran, 0),
                like="" if ran == info.name else ran,
            )
        )
    return tuple(layers)


def own_parameters(traced: TracedModel) -> dict[str, tuple[str, ...]]:
    """The parameters that each layer is charged for: a tied one is held once, its layers share a stage, and the first
    of them is charged."""
    charged: set[str] = set()
    found = {}
    for info in traced.layers:
        found[info.name] = tuple(name for name in info.parameters if name not in charged)
        charged.update(found[info.name])
    return found


def waiting(samples: Samples, times: dict[str, list[float]]) -> float:
    """What a pass takes over the sum of what its layers take, by medians.

    A short layer is rarely the one that has to wait for a core, so that its median knows nothing of it; a pass is long
    enough to. Each layer is charged in proportion to its own time.
    """
    apart = sum(samples.weights.get(name, 1) * median(one) for name, one in times.items())
    return median(samples.totals(times)) / apart if apart > 0 else 1.0


def edges_of(traced: TracedModel, minibatch: int) -> tuple[Edge, ...]:
    """What crosses between layers, at a minibatch size."""
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
    """The processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
