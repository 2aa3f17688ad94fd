"""Profiles of language models as a tracer would name their layers, and plans for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.virtual_stages import with_depths
from pipeplan.errors import InputError
from pipeplan.exports.target import ExportTarget, export_files
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import FLUSH
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights

MS = 1e-3


def decoder(blocks: int, *, rotary: bool = False, tied: bool = False, minibatch: int = 4) -> Profile:
    """`wte`, `h.0` … with a residual connection around a linear layer each, `ln_f`, `lm_head`, `loss`."""
    layers = [_layer("wte", "Embedding", 400)]
    tensors, stream = [], "wte"
    if rotary:
        layers.append(_layer("rotary", "Rotary", 0))
        tensors.append(Tensor("rotary", "rotary", tuple(f"h.{n}.attn" for n in range(blocks)), 16, 0))
    for number in range(blocks):
        norm, attention, add = f"h.{number}.ln", f"h.{number}.attn", f"h.{number}.add"
        layers += [
            _layer(norm, "LayerNorm", 8),
            _layer(attention, "Attention", 100),
            _layer(add, "add", 0, f"h.{number}"),
        ]
        tensors.append(Tensor(stream, stream, (norm, add), 64, 64))
        tensors += [Tensor(norm, norm, (attention,), 64, 64), Tensor(attention, attention, (add,), 64, 64)]
        stream = add
    for name, op, weights in (("ln_f", "LayerNorm", 8), ("lm_head", "Linear", 400), ("loss", "loss", 0)):
        layers.append(_layer(name, op, weights, "" if name == "loss" else name))
        tensors.append(Tensor(stream, stream, (name,), 64, 64))
        stream = name
    together = (("wte", "lm_head"),) if tied else ()
    return Profile(tuple(layers), tuple(tensors), minibatch, model_name="decoder", together=together)


def tied_decoder(blocks: int, *layers: str) -> Profile:
    """A decoder of which some layers, by default its embedding and its head, share a weight."""
    tie = TiedWeights(("wte.weight = lm_head.weight",), layers or ("wte", "lm_head"), 100)
    return replace(decoder(blocks), tied=(tie,))


def chain(names: Sequence[str], *, minibatch: int = 4) -> Profile:
    """Layers one after another, the last of which is the loss."""
    layers = tuple(_layer(name, "loss" if name == "loss" else "Linear", 0 if name == "loss" else 100) for name in names)
    tensors = tuple(Tensor(one, one, (other,), 64, 64) for one, other in itertools.pairwise(names))
    return Profile(layers, tensors, minibatch, model_name="chain")


def problem(profile: Profile, servers: int = 1, devices: int = 4, options: Options | None = None) -> Problem:
    """On so many servers of so many devices."""
    levels = (Level("server", devices, 10e9), *([Level("cluster", servers, 1e9)] if servers > 1 else []))
    return Problem(profile, Cluster("lab", Device("A100", "cuda", 2**30), levels), options or Options())


def grid(profile: Profile, cuts: Sequence[str], replicas: int = 1, accumulate: int = 8, **fields: object) -> Plan:
    """Stages that begin with the first layer and with each of `cuts`, on workers 0, 1, 2 …"""
    names = [layer.name for layer in profile.layers]
    ends = [0, *map(names.index, cuts), len(names)]
    stages = [
        Stage(
            tuple(names[first:stop]), tuple(range(place * replicas, (place + 1) * replicas)), len(cuts) + 1 - place, 1
        )
        for place, (first, stop) in enumerate(itertools.pairwise(ends))
    ]
    return Plan(tuple(stages), **({"schedule": FLUSH, "accumulate": accumulate} | fields))


def folded(profile: Profile, cuts: Sequence[str], schedule: str, accumulate: int, replicas: int = 1) -> Plan:
    """Four stages on two positions of so many workers each: round them, or down and back up under zb-v."""
    names = [layer.name for layer in profile.layers]
    ends = [0, *map(names.index, cuts), len(names)]
    places = {"interleaved-1f1b": (0, 1, 0, 1), "zb-v": (0, 1, 1, 0)}[schedule]
    stages = [
        Stage(tuple(names[a:b]), tuple(range(place * replicas, (place + 1) * replicas)), 1, 1)
        for (a, b), place in zip(itertools.pairwise(ends), places, strict=True)
    ]
    return with_depths(Plan(tuple(stages), schedule=schedule, accumulate=accumulate))


def refusal(target: ExportTarget, made_of: Problem, plan: Plan) -> str:
    """The line with which a target refuses a plan."""
    with pytest.raises(InputError) as error:
        export_files(target, made_of, plan)
    assert "\n" not in str(error.value)
    return str(error.value)


def _layer(name: str, op: str, weights: int, module: str | None = None) -> Layer:
    return Layer(name, MS, 2 * MS, weights, 64, module=name if module is None else module, op=op)
