"""Spreads what was measured of stages over their layers, in proportion to what the profile says of these.

Of a stage with forward f, backward b and step u in the profile, and F, B, U measured:

    forward of a layer   its own · (F + o F / (F + B)) / f    and at one layer what reading samples takes: the first of
                                                              a stage, of the last stage of several the last
    backward             its own · (B + o B / (F + B)) / b
    step                 its own · U / u

o is all else that keeps a replica busy, less what the prediction charges for all-reduces: handing tensors over, the
executor itself, being held up by all-reduces. A plan is charged with it through the layers of its stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeplan.calibrate.observed import Observed
from pipeplan.profile_data import Layer, Profile, Size

LEAST = 0.2
"""Share of what was measured of a stage's passes that is left to its layers, whatever links are charged with."""


@dataclass(frozen=True)
class Times:
    """Of one layer, s for a minibatch on a worker of speed 1."""

    forward_s: float
    backward_s: float
    update_s: float


def spread(run: Observed, profile: Profile, speeds: Sequence[float], exposed_s: Sequence[float]) -> dict[str, Times]:
    """The times of all layers by one run. `speeds`: of the stages' workers. `exposed_s`: what the prediction charges a
    replica with beside its layers' times, by stage."""
    layers = {layer.name: layer for layer in profile.layers}
    order = {layer.name: index for index, layer in enumerate(profile.layers)}
    found: dict[str, Times] = {}
    for stage, busy, speed, exposed in zip(run.plan.stages, run.stages, speeds, exposed_s, strict=True):
        own = sorted((layers[name] for name in stage.layers), key=lambda layer: order[layer.name])
        passes = busy.forward_s + busy.backward_s
        rest = max(busy.own_s + busy.sync_s - exposed, (LEAST - 1.0) * passes)
        grown = 1.0 + rest / passes
        forward, backward = busy.forward_s * grown * speed, busy.backward_s * grown * speed
        if stage.recompute:  # its backward pass runs forward again
            backward = max(backward - forward, LEAST * backward)
        share = run.options.update_share
        update = busy.update_s * speed / share if share else 0.0
        forwards = _parts(own, forward, lambda layer: layer.forward_s)
        backwards = _parts(own, backward, lambda layer: layer.backward_s)
        updates = _parts(own, update, lambda layer: layer.update_s, lambda layer: layer.parameter_bytes)
        # The last stage reads for the targets, which the loss needs, its last layer.
        forwards[-1 if stage is run.plan.stages[-1] and len(run.plan.stages) > 1 else 0] += busy.load_s * speed
        for layer, *times in zip(own, forwards, backwards, updates, strict=True):
            found[layer.name] = Times(*times)
    if run.plan.inference:  # which says nothing of the rest
        return {name: replace(_as_before(layers[name]), forward_s=times.forward_s) for name, times in found.items()}
    return found


def _as_before(layer: Layer) -> Times:
    return Times(layer.forward_s, layer.backward_s, layer.update_s)


def stretched(times: Mapping[str, Times], slack: float, *, inference: bool) -> dict[str, Times]:
    """All times, `slack` times as long; of runs of inference only what they measured."""
    rest = 1.0 if inference else slack
    return {
        name: Times(one.forward_s * slack, one.backward_s * rest, one.update_s * rest) for name, one in times.items()
    }


def _parts(layers: Sequence[Layer], total: float, *measures: Callable[[Layer], float]) -> list[float]:
    """A total in parts that are as the first measure that is not zero for all of them, else alike."""
    for measure in measures:
        weights = [measure(layer) for layer in layers]
        if sum(weights) > 0:
            return [total * weight / sum(weights) for weight in weights]
    return [total / len(layers)] * len(layers)


def mean(found: Sequence[Mapping[str, Times]]) -> dict[str, Times]:
    """The mean of what several runs say of every layer."""

    def average(name: str, what: str) -> float:
        return math.fsum(getattr(one[name], what) for one in found) / len(found)

    names = found[0]
    return {name: Times(*(average(name, what) for what in Times.__dataclass_fields__)) for name in names}


def with_times(profile: Profile, times: Mapping[str, Times]) -> Profile:
    """The profile with these times; its other minibatch sizes by the same factors."""
    sizes = tuple(_size(size, profile, times) for size in profile.sizes)
    layers = tuple(_layer(layer, times[layer.name]) for layer in profile.layers)
    return replace(profile, layers=layers, sizes=sizes, whole_forward_s=None, whole_backward_s=None)


def _layer(layer: Layer, times: Times) -> Layer:
    """Spreads grow with the times; a layer that stood for others has times of its own now."""
    return replace(
        layer,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        update_s=times.update_s,
        forward_spread_s=layer.forward_spread_s * _ratio(times.forward_s, layer.forward_s),
        backward_spread_s=layer.backward_spread_s * _ratio(times.backward_s, layer.backward_s),
        like="",
    )


def _size(size: Size, profile: Profile, times: Mapping[str, Times]) -> Size:
    layers = []
    for layer, own in zip(size.layers, profile.layers, strict=True):
        new = times[layer.name]
        scaled = Times(
            layer.forward_s * _ratio(new.forward_s, own.forward_s),
            layer.backward_s * _ratio(new.backward_s, own.backward_s),
            # The step does not depend on the size of a minibatch.
            new.update_s,
        )
        layers.append(_layer(layer, scaled))
    return replace(size, layers=tuple(layers), whole_forward_s=None, whole_backward_s=None)


def _ratio(new: float, old: float) -> float:
    return new / old if old > 0 else 1.0
