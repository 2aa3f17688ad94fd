"""Computes the bundled VGG-16 profile: what a V100 would take, from FLOPs, bytes and its published rates.

    python profiles/vgg16_v100.py [OUTPUT]

A layer takes the larger of its arithmetic at the card's peak rate and its memory traffic at the card's bandwidth; no
efficiency is assumed, and nothing was measured. The layers and their names are those of the traced bundled model.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from pipeplan import __version__
from pipeplan.profile import Layer, Profile, Provenance, Tensor
from pipeplan_launch.loading import load_job
from pipeplan_launch.trace import TensorSpec, TracedModel, trace

MINIBATCH = 64
# NVIDIA Tesla V100 datasheet (SXM2): 15.7 TFLOP/s in float32, 900 GB/s of memory bandwidth.
PEAK_FLOPS = 15.7e12
MEMORY_BANDWIDTH = 900e9
# Backward computes two products of the size of the forward one: by the weights and by the inputs.
BACKWARD_FLOPS = 2.0
# Backward of a layer without weights reads the gradient and what was kept, and writes a gradient.
BACKWARD_BYTES = 1.5
IMAGE = (3, 224, 224)


def main() -> None:
    """Write the profile to the path given, or beside this script."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("vgg16-v100.json")
    build().save(output)


def build() -> Profile:
    """The modelled profile at a minibatch of 64."""
    traced = trace(load_job("vgg16", seed=0), MINIBATCH)
    parameters = dict(traced.model.named_parameters())
    read = {consumer: spec for spec in traced.tensors for consumer in spec.consumers}
    made = {spec.producer: spec for spec in traced.tensors}
    return Profile(
        layers=tuple(_layer(info, read.get(info.name), made.get(info.name), parameters) for info in traced.layers),
        tensors=tuple(_tensor(spec) for spec in traced.tensors),
        minibatch=MINIBATCH,
        model_ref="vgg16",
        model_name="vgg16",
        provenance=_provenance(traced),
        together=traced.together,
    )


def _provenance(traced: TracedModel) -> Provenance:
    how = (
        f"modelled, not measured: per layer the larger of FLOPs at {PEAK_FLOPS / 1e12:g} TFLOP/s and bytes at "
        f"{MEMORY_BANDWIDTH / 1e9:g} GB/s (NVIDIA's published peaks for the V100 SXM2), by profiles/vgg16_v100.py"
    )
    return Provenance(kind="modelled", device="cuda", device_name="V100", how=how, pipeplan=__version__)


def _layer(info: Any, source: TensorSpec | None, result: TensorSpec | None, parameters: dict[str, Any]) -> Layer:
    weights = [parameters[name] for name in info.parameters]
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    into = source.bytes(MINIBATCH) if source else MINIBATCH * math.prod(IMAGE) * 4
    out = result.bytes(MINIBATCH) if result else 0
    flops = _flops(weights, result)
    traffic = into + out + size
    forward = max(flops / PEAK_FLOPS, traffic / MEMORY_BANDWIDTH)
    backward = max(BACKWARD_FLOPS * flops / PEAK_FLOPS, BACKWARD_BYTES * traffic / MEMORY_BANDWIDTH)
    return Layer(
        name=info.name,
        module=info.module,
        op=info.op,
        forward_s=forward,
        backward_s=backward,
        parameter_bytes=size,
        saved_bytes=_saved(info.op, source, result),
    )


def _flops(weights: list[Any], result: TensorSpec | None) -> float:
    """Two per multiply-add: every output element is a product with the weights of one output channel."""
    if not weights or result is None:
        return 0.0
    per_output = weights[0].numel() / weights[0].shape[0]
    return 2.0 * per_output * math.prod(result.shape(MINIBATCH))


def _saved(op: str, source: TensorSpec | None, result: TensorSpec | None) -> int:
    """Layers with weights keep their input, which is the output of a ReLU before them; pooling keeps indices too."""
    kept = source.bytes(MINIBATCH) if source else 0
    elements = math.prod(result.shape(MINIBATCH)) if result else 0
    name = op.lower()
    if "relu" in name or "loss" in name:
        return 0
    if "dropout" in name:
        return elements
    return kept + 8 * elements if "pool" in name else kept


def _tensor(spec: TensorSpec) -> Tensor:
    size = spec.bytes(MINIBATCH)
    return Tensor(spec.name, spec.producer, spec.consumers, size, size if spec.requires_grad else 0)


if __name__ == "__main__":
    main()
