"""What a layer takes while it runs beyond what it is given, makes and keeps."""

from __future__ import annotations

import torch

from pipeplan.profiler.allocations import recorded
from pipeplan.profiler.layer_run import LayerRun, Measure


def measure_workspaces(run: LayerRun, device: torch.device) -> dict[str, int]:
    """Bytes by layer, of those that run: the most of forward and backward; one pass. Empty where nothing was noted."""
    names: list[str] = []

    def both(measure: Measure) -> None:
        names.extend(run.forward(measure))
        run.backward(measure)

    uses = recorded(device, both)
    if len(uses) != 2 * len(names):
        return {}
    layers = {layer.name: layer for layer in run.layers}
    found = {}
    for name, forward, backward in zip(names, uses, reversed(uses), strict=False):
        layer = layers[name]
        gradients = sum(spec.bytes(run.minibatch) for spec in layer.receives if spec.requires_grad)
        gradients += sum(one.nbytes for one in layer.trained)
        found[name] = max(0, forward.most - forward.left, backward.most - gradients)
    return found
