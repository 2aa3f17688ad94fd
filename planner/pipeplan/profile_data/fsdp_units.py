"""FSDP units of a model. FSDP gathers the weights of a unit together; the executor wraps repeated blocks as units.

Each member of the largest list of equal modules is a unit, such as `transformer.h.0`, `transformer.h.1`, … The weights
of all other layers belong to the root, which is gathered for the whole pass. If a profile has no module names, as after
an import, runs of consecutive layers with about 25 MB of weights are the units.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.profile_data.layers import Layer

LEAST_BYTES = 25 * 10**6
"""Bytes of weights at which a run of consecutive layers is closed."""


@dataclass(frozen=True)
class FsdpUnit:
    """Consecutive layers of a profile."""

    layers: tuple[Layer, ...]
    wrapped: bool = True
    """Whether the unit gathers its own weights, and recomputes separately. Otherwise its weights belong to the root."""

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the weights that the unit gathers."""
        return self.wrapped * sum(layer.weight_bytes for layer in self.layers)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the gradients that the unit reduces. Only trained weights have gradients."""
        return self.wrapped * sum(layer.parameter_bytes for layer in self.layers)


def list_member(layer: Layer) -> tuple[str, int] | None:
    """(path of the module list that holds a layer, index in the list); None if there is no list.

    If lists are nested directly, the inner list counts (`stages.0.1`). A list deeper inside a member does not count
    (`layers.3.experts.2`).
    """
    parts = (layer.module or layer.name.partition("#")[0]).split(".")
    for index, part in enumerate(parts):
        if _is_index(part) and not (index + 1 < len(parts) and _is_index(parts[index + 1])):
            return ".".join(parts[:index]), int(part)
    return None


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdecimal()


def fsdp_units(layers: Sequence[Layer]) -> tuple[FsdpUnit, ...]:
    """The units of a model in the order of its layers. Together they contain all layers."""
    starts = _starts_of_blocks(layers)
    if not starts:
        named = any(layer.module for layer in layers)
        return (FsdpUnit(tuple(layers), wrapped=False),) if named else _runs(layers)
    parts = [FsdpUnit(tuple(layers[: starts[0]]), wrapped=False)]
    parts += [FsdpUnit(tuple(layers[first:stop])) for first, stop in itertools.pairwise(starts)]
    parts.append(FsdpUnit(tuple(layers[starts[-1] :]), wrapped=False))
    return tuple(part for part in parts if part.layers)


def _runs(layers: Sequence[Layer]) -> tuple[FsdpUnit, ...]:
    """Runs of consecutive layers with weights of at least `LEAST_BYTES`; the last run may have less."""
    units, run, filled = [], list[Layer](), 0
    for layer in layers:
        run.append(layer)
        filled += layer.weight_bytes
        if filled >= LEAST_BYTES:
            units.append(FsdpUnit(tuple(run)))
            run, filled = [], 0
    return (*units, FsdpUnit(tuple(run))) if run else tuple(units)


def _starts_of_blocks(layers: Sequence[Layer]) -> list[int]:
    """The position of the first layer of every block, and the position behind the last block; empty without blocks."""
    lists: dict[str, dict[int, list[int]]] = {}
    for position, layer in enumerate(layers):
        if member := list_member(layer):
            lists.setdefault(member[0], {}).setdefault(member[1], []).append(position)
    alike = [members for members in lists.values() if _are_alike(layers, members)]
    if not alike:
        return []
    members = max(alike, key=lambda one: sum(layers[place].weight_bytes for places in one.values() for place in places))
    return [*(places[0] for places in members.values()), list(members.values())[-1][-1] + 1]


def _are_alike(layers: Sequence[Layer], members: dict[int, list[int]]) -> bool:
    """Whether there are several consecutive members with weights.

    Members that are single layers must have the same class.
    """
    weights = all(any(layers[place].weight_bytes for place in places) for places in members.values())
    kinds = {len(places) == 1 and layers[places[0]].op.partition("(")[0] for places in members.values()}
    ends = [(places[0], places[-1]) for places in members.values()]
    apart = all(before[1] < behind[0] for before, behind in itertools.pairwise(ends))
    return len(members) > 1 and weights and apart and len(kinds) == 1
