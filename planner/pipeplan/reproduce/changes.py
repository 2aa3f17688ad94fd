"""What may be wrong with a profile, put right: each a change whose effect on a prediction is an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeplan import devices
from pipeplan.profile_data import Layer, Profile
from pipeplan.reproduce.published import Published

WORDS = {"gnmt8": (48, 31), "gnmt16": (25, 34)}
"""Of a sentence: in the published sizes, which are of one minibatch, and in the times, which are means of a hundred
others (docs/estimate.md)."""
PASSES = {1.0: 14, 2.0: 22}
"""Times that an optimiser's step reads or writes the weights, by the state it keeps, one kernel an operation.

SGD with momentum and weight decay: the gradient divided (2), weight decay added (3), momentum scaled and added (5),
the weights (3), the gradient zeroed (1). Adam: divided (2), both means scaled and added (11), root and its sum (4),
the weights (4), zeroed (1). Copies of older versions come on top. (runtime/optimizer.py of msr-fiddle/pipedream,
which steps after every minibatch, and torch.optim of that time.)
"""


def as_other_minibatch(profile: Profile, taken: int, true: int) -> Profile:
    """The profile as it looks to someone who takes the size that it was measured at for another one."""
    return replace(profile.rescaled(profile.minibatch * true // taken), minibatch=profile.minibatch)


def repaired(row: Published, profile: Profile) -> Profile:
    """A published GNMT profile with what its neighbours hold back where it belongs, and sizes of as many words as its
    times.

    The backward pass of the bidirectional LSTM is in the embedding's time, most of the classifier's in the last LSTM's:
    the embedding is given what the other one takes, the LSTM what the one before takes, and the rest goes to the layer
    that it was taken from. The sum stays. Other profiles come back as they are.
    """
    if row.profile not in WORDS or not any(layer.op.startswith("EmuBidirLSTM") for layer in profile.layers):
        return profile
    layers = {layer.name: layer for layer in profile.layers}
    of = {kind: [one for one in profile.layers if one.op.startswith(kind)] for kind in ("Embedding", "LSTM(2048")}
    bidirectional = next(layer for layer in profile.layers if layer.op.startswith("EmuBidirLSTM"))
    classifier = next(layer for layer in profile.layers if layer.op.startswith("Classifier"))
    source = next(one for one in of["Embedding"] if one.backward_s == max(e.backward_s for e in of["Embedding"]))
    other = next(one for one in of["Embedding"] if one is not source)
    last = max(of["LSTM(2048"], key=lambda layer: layer.backward_s)
    before = [one for one in of["LSTM(2048"] if one is not last][-1]
    _give(layers, source, bidirectional, other.backward_s)
    _give(layers, last, classifier, before.backward_s)
    written, timed = WORDS[row.profile]
    tensors = tuple(
        replace(one, bytes=one.bytes * timed // written, gradient_bytes=one.gradient_bytes * timed // written)
        for one in profile.tensors
    )
    return replace(profile, layers=tuple(layers.values()), tensors=tensors, sizes=())


def _give(layers: dict[str, Layer], source: Layer, target: Layer, left_s: float) -> None:
    """Leave the source so much backward time, and give the rest to the target."""
    moved = source.backward_s - left_s
    layers[source.name] = replace(source, backward_s=left_s)
    layers[target.name] = replace(target, backward_s=target.backward_s + moved)


def with_step(profile: Profile, optimizer_state: Mapping[str, float], row: Published) -> Profile:
    """With the optimiser's step of every layer, in separate kernels on a V100, in place of what the profile has."""
    device = devices.load("v100")
    rate = device.bandwidth * device.shares["elementwise"].memory
    passes = PASSES[optimizer_state.get(row.profile, 1.0)]
    layers = tuple(replace(one, update_s=passes * one.parameter_bytes / rate) for one in profile.layers)
    return replace(profile, layers=layers)


def computing(profile: Profile, factor: float) -> Profile:
    """All layers so many times as slow."""
    layers = tuple(
        replace(one, forward_s=one.forward_s * factor, backward_s=one.backward_s * factor) for one in profile.layers
    )
    return replace(profile, layers=layers)
