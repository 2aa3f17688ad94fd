"""What an emulated stage does, as its stage file says it under `emulation`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeplan_launch import fields
from pipeplan_launch.errors import LaunchError

MOST_BYTES = 2**40


@dataclass(frozen=True)
class EmulatedLayer:
    """Some of the stage's computing, with the parameters that it trains."""

    forward_s: float
    backward_s: float
    parameter_bytes: int


@dataclass(frozen=True)
class Crossing:
    """What crosses a cut, in bytes a minibatch."""

    sent: int
    returned: int
    """Of the gradients, which come back; no more than what was sent."""


@dataclass(frozen=True)
class EmulatedStage:
    """One stage: it sleeps where another computes, and sends and averages as many bytes."""

    layers: tuple[EmulatedLayer, ...]
    update_s: float
    """Of the optimiser, per update."""
    before: Crossing | None
    after: Crossing | None
    minibatches: int
    """Of an epoch."""
    bucket_bytes: int
    """At which a bucket of gradients closes."""


def emulated_stage(content: Mapping[str, Any], where: str) -> EmulatedStage | None:
    """What a stage file says; None for a stage that computes. Raises `LaunchError`."""
    if content.get("emulation") is None:
        return None
    given = fields.mapping(dict(content), "emulation", where)
    return EmulatedStage(
        layers=tuple(_layer(entry, where) for entry in fields.listing(given, "layers", where)),
        update_s=_seconds(given, "update_s", where),
        before=_crossing(given, "before", where),
        after=_crossing(given, "after", where),
        minibatches=fields.integer(given, "minibatches", where, least=1),
        bucket_bytes=fields.integer(given, "bucket_bytes", where, least=1, most=MOST_BYTES),
    )


def _layer(entry: Any, where: str) -> EmulatedLayer:
    if not isinstance(entry, dict):
        raise LaunchError(f"{where}: every layer of an emulated stage must be an object")
    return EmulatedLayer(
        _seconds(entry, "forward_s", where),
        _seconds(entry, "backward_s", where),
        fields.integer(entry, "parameter_bytes", where, least=0, most=MOST_BYTES),
    )


def _seconds(given: dict[str, Any], name: str, where: str) -> float:
    value = fields.amount(given, name, where)
    if value is None:
        raise LaunchError(f"{where}: {name!r} must be a number of seconds")
    return value


def _crossing(given: dict[str, Any], name: str, where: str) -> Crossing | None:
    if given.get(name) is None:
        return None
    inner = fields.mapping(given, name, where)
    sent = fields.integer(inner, "sent", where, least=0, most=MOST_BYTES)
    return Crossing(sent, fields.integer(inner, "returned", where, least=0, most=sent))
