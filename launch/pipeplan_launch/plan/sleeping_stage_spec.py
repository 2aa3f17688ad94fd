"""The description of an emulated stage, read from `emulation` of its stage file. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan import json_fields

MOST_BYTES = 2**40


@dataclass(frozen=True)
class EmulatedLayer:
    """A part of the stage's computation, with the size of its parameters."""

    forward_s: float
    backward_s: float
    parameter_bytes: int


@dataclass(frozen=True)
class CutTraffic:
    """Traffic across the cut between two stages, in bytes per minibatch."""

    sent: int
    """Bytes of activations."""
    returned: int
    """Bytes of gradients, at most as many as of activations."""


@dataclass(frozen=True)
class EmulatedStage:
    """A stage that sleeps instead of computing, and sends and averages as many bytes as the stage it stands for."""

    layers: tuple[EmulatedLayer, ...]
    update_s: float
    """Time of the optimiser per update, in seconds."""
    before: CutTraffic | None
    """Traffic with the previous stage; None for the first stage."""
    after: CutTraffic | None
    """Traffic with the next stage; None for the last stage."""
    minibatches: int
    """Number of minibatches of an epoch."""
    bucket_bytes: int
    """Size at which a bucket of gradients closes."""
    products: int = 0
    """Matrix products that a forward pass of each layer computes beside its sleep; a backward pass twice as many."""


def read_emulated_stage(content: Mapping[str, Any], where: str) -> EmulatedStage | None:
    """Read `emulation` of a stage file; None for a stage that computes. Raises `LaunchError`."""
    if content.get("emulation") is None:
        return None
    emulation = json_fields.mapping(dict(content), "emulation", where)
    return EmulatedStage(
        layers=tuple(_layer(entry, where) for entry in json_fields.listing(emulation, "layers", where)),
        update_s=_seconds(emulation, "update_s", where),
        before=_crossing(emulation, "before", where),
        after=_crossing(emulation, "after", where),
        minibatches=json_fields.integer(emulation, "minibatches", where, least=1),
        bucket_bytes=json_fields.integer(emulation, "bucket_bytes", where, least=1, most=MOST_BYTES),
        products=json_fields.integer(emulation, "products", where, least=0) if "products" in emulation else 0,
    )


def _layer(entry: Any, where: str) -> EmulatedLayer:
    if not isinstance(entry, dict):
        raise LaunchError(f"{where}: every layer of an emulated stage must be an object")
    return EmulatedLayer(
        _seconds(entry, "forward_s", where),
        _seconds(entry, "backward_s", where),
        json_fields.integer(entry, "parameter_bytes", where, least=0, most=MOST_BYTES),
    )


def _seconds(entry: dict[str, Any], name: str, where: str) -> float:
    value = json_fields.amount(entry, name, where)
    if value is None:
        raise LaunchError(f"{where}: {name!r} must be a number of seconds")
    return value


def _crossing(content: dict[str, Any], name: str, where: str) -> CutTraffic | None:
    if content.get(name) is None:
        return None
    inner = json_fields.mapping(content, name, where)
    sent = json_fields.integer(inner, "sent", where, least=0, most=MOST_BYTES)
    return CutTraffic(sent, json_fields.integer(inner, "returned", where, least=0, most=sent))
