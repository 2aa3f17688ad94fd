"""Corrections of published profiles. The experiments show the effect of each on the predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeplan.cluster_data import devices
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from table1.published import PublishedRow

WORDS = {"gnmt8": (48, 31), "gnmt16": (25, 34)}
"""Words per sentence: in the published sizes, which are of one minibatch, and in the published times, which are means
over a hundred other minibatches (docs/estimate.md)."""
PASSES = {1.0: 14, 2.0: 22}
"""How often an optimiser's step reads or writes the weights, with one kernel per operation, by the numbers per weight
that it keeps.

SGD with momentum and weight decay: the gradient divided (2), weight decay added (3), momentum scaled and added (5),
the weights (3), the gradient zeroed (1). Adam: divided (2), both means scaled and added (11), root and its sum (4),
the weights (4), zeroed (1). Copies of older versions come on top. (runtime/optimizer.py of msr-fiddle/pipedream,
which steps after every minibatch, and torch.optim of that time.)
"""


def repaired(row: PublishedRow, profile: Profile) -> Profile:
    """A published GNMT profile with backward times moved to their layers, and with sizes of as many words as its times.

    The profiler attributed the backward pass of the bidirectional LSTM to an embedding, and most of the classifier's to
    the last LSTM. That embedding gets the time of the other embedding, that LSTM the time of the LSTM before it, and
    the remainder goes to the layer whose time it is. The sum does not change. Other profiles are returned unchanged.
    """
    if row.profile not in WORDS or not any(layer.op.startswith("EmuBidirLSTM") for layer in profile.layers):
        return profile
    layers = {layer.name: layer for layer in profile.layers}
    by_kind = {kind: [one for one in profile.layers if one.op.startswith(kind)] for kind in ("Embedding", "LSTM(2048")}
    bidirectional = next(layer for layer in profile.layers if layer.op.startswith("EmuBidirLSTM"))
    classifier = next(layer for layer in profile.layers if layer.op.startswith("Classifier"))
    source = next(
        one for one in by_kind["Embedding"] if one.backward_s == max(e.backward_s for e in by_kind["Embedding"])
    )
    other = next(one for one in by_kind["Embedding"] if one is not source)
    last = max(by_kind["LSTM(2048"], key=lambda layer: layer.backward_s)
    before = [one for one in by_kind["LSTM(2048"] if one is not last][-1]
    _move_backward(layers, source, bidirectional, other.backward_s)
    _move_backward(layers, last, classifier, before.backward_s)
    written, timed = WORDS[row.profile]
    tensors = tuple(
        replace(one, bytes=one.bytes * timed // written, gradient_bytes=one.gradient_bytes * timed // written)
        for one in profile.tensors
    )
    return replace(profile, layers=tuple(layers.values()), tensors=tensors, sizes=())


def _move_backward(layers: dict[str, Layer], source: Layer, target: Layer, left_s: float) -> None:
    """Leave `left_s` of backward time with the source, and move the rest to the target."""
    moved = source.backward_s - left_s
    layers[source.name] = replace(source, backward_s=left_s)
    layers[target.name] = replace(target, backward_s=target.backward_s + moved)


def with_step(profile: Profile, optimizer_state: Mapping[str, float], row: PublishedRow) -> Profile:
    """Set the optimiser's step of every layer to its time in separate kernels on a V100."""
    device = devices.load_device("v100")
    rate = device.bandwidth * device.shares["elementwise"].memory
    passes = PASSES[optimizer_state.get(row.profile, 1.0)]
    layers = tuple(replace(one, update_s=passes * one.parameter_bytes / rate) for one in profile.layers)
    return replace(profile, layers=layers)
