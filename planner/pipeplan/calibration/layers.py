"""Distribution of a stage's measured times over its layers, in proportion to the times in the profile.

For a stage with forward f, backward b and step u in the profile, and F, B, U measured:

    forward of a layer   its own · (F + o F / (F + B)) / f    plus, at one layer, the time of reading samples: at the
                                                              first of a stage, at the last of the last of several
    backward             its own · (B + o B / (F + B)) / b
    step                 its own · U / u

o is all other busy time of a replica (sending tensors, the executor itself, being held up by all-reduces) less the
predicted exposed time of all-reduces. Plans are charged for it through the layers of their stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeplan.calibration.measured_stages import ObservedRun
from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.profile import Profile

LEAST = 0.2
"""Least share of a stage's measured passes that its layers get, however large the predicted all-reduces are."""


@dataclass(frozen=True)
class LayerTimes:
    """The times of one layer, in seconds per minibatch on a worker of speed 1."""

    forward_s: float
    backward_s: float
    update_s: float


def layer_times(
    run: ObservedRun, profile: Profile, speeds: Sequence[float], exposed_s: Sequence[float]
) -> dict[str, LayerTimes]:
    """The times of all layers by one run.

    `speeds` are those of the stages' workers. `exposed_s` is the predicted exposed time of all-reduces, by stage.
    """
    layers = {layer.name: layer for layer in profile.layers}
    order = {layer.name: index for index, layer in enumerate(profile.layers)}
    times_by_layer: dict[str, LayerTimes] = {}
    for stage, busy, speed, exposed in zip(run.plan.stages, run.stages, speeds, exposed_s, strict=True):
        stage_layers = sorted((layers[name] for name in stage.layers), key=lambda layer: order[layer.name])
        passes = busy.forward_s + busy.backward_s
        rest = max(busy.own_s + busy.sync_s - exposed, (LEAST - 1.0) * passes)
        grown = 1.0 + rest / passes
        forward, backward = busy.forward_s * grown * speed, busy.backward_s * grown * speed
        if stage.recompute:  # its backward pass runs forward again
            backward = max(backward - forward, LEAST * backward)
        share = run.options.update_share
        update = busy.update_s * speed / share if share else 0.0
        forwards = _parts(stage_layers, forward, lambda layer: layer.forward_s)
        backwards = _parts(stage_layers, backward, lambda layer: layer.backward_s)
        updates = _parts(stage_layers, update, lambda layer: layer.update_s, lambda layer: layer.parameter_bytes)
        # The last stage reads for the targets, which the loss needs, its last layer.
        forwards[-1 if stage is run.plan.stages[-1] and len(run.plan.stages) > 1 else 0] += busy.load_s * speed
        for layer, *times in zip(stage_layers, forwards, backwards, updates, strict=True):
            times_by_layer[layer.name] = LayerTimes(*times)
    if run.plan.inference:  # an inference measures forward passes only
        return {
            name: replace(_times(layers[name]), forward_s=measured.forward_s)
            for name, measured in times_by_layer.items()
        }
    return times_by_layer


def _times(layer: Layer) -> LayerTimes:
    return LayerTimes(layer.forward_s, layer.backward_s, layer.update_s)


def stretched_times(times: Mapping[str, LayerTimes], slack: float, *, inference: bool) -> dict[str, LayerTimes]:
    """All times multiplied by `slack`; with inference only the forward times, which it measures."""
    other_slack = 1.0 if inference else slack
    return {
        name: LayerTimes(measured.forward_s * slack, measured.backward_s * other_slack, measured.update_s * other_slack)
        for name, measured in times.items()
    }


def _parts(layers: Sequence[Layer], total: float, *measures: Callable[[Layer], float]) -> list[float]:
    """A total in parts proportional to the first measure that is not zero for all layers, else in equal parts."""
    for measure in measures:
        weights = [measure(layer) for layer in layers]
        if sum(weights) > 0:
            return [total * weight / sum(weights) for weight in weights]
    return [total / len(layers)] * len(layers)


def mean_times(by_run: Sequence[Mapping[str, LayerTimes]]) -> dict[str, LayerTimes]:
    """The mean over several runs of every layer's times."""

    def average(layer: str, field: str) -> float:
        return math.fsum(getattr(times[layer], field) for times in by_run) / len(by_run)

    return {
        layer: LayerTimes(*(average(layer, field) for field in LayerTimes.__dataclass_fields__)) for layer in by_run[0]
    }


def with_times(profile: Profile, times: Mapping[str, LayerTimes]) -> Profile:
    """The profile with these times. Times at other minibatch sizes change by the same factors."""
    sizes = tuple(_size(size, profile, times) for size in profile.sizes)
    layers = tuple(_layer(layer, times[layer.name]) for layer in profile.layers)
    return replace(profile, layers=layers, sizes=sizes, whole_forward_s=None, whole_backward_s=None)


def _layer(layer: Layer, times: LayerTimes) -> Layer:
    """A layer with these times. Spreads grow with the times, and the layer no longer stands for others."""
    return replace(
        layer,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        update_s=times.update_s,
        forward_spread_s=layer.forward_spread_s * _ratio(times.forward_s, layer.forward_s),
        backward_spread_s=layer.backward_spread_s * _ratio(times.backward_s, layer.backward_s),
        like="",
    )


def _size(size: Size, profile: Profile, times: Mapping[str, LayerTimes]) -> Size:
    layers = []
    for layer, profiled in zip(size.layers, profile.layers, strict=True):
        new = times[layer.name]
        scaled = LayerTimes(
            layer.forward_s * _ratio(new.forward_s, profiled.forward_s),
            layer.backward_s * _ratio(new.backward_s, profiled.backward_s),
            # The step does not depend on the size of a minibatch.
            new.update_s,
        )
        layers.append(_layer(layer, scaled))
    return replace(size, layers=tuple(layers), whole_forward_s=None, whole_backward_s=None)


def _ratio(new: float, old: float) -> float:
    return new / old if old > 0 else 1.0
