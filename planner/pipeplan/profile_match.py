"""Which layers of two profiles are the same: by name, else by order and kind, else as a module and its parts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.profile_data import Layer, Profile

NAME, ORDER, WEIGHTS, MODULE = "name", "order and kind", "order and weights", "module"
"""How layers were matched."""


@dataclass(frozen=True)
class Match:
    """Layers of one profile and those of another that are the same; one of the two is a single layer."""

    first: tuple[Layer, ...]
    second: tuple[Layer, ...]
    by: str


@dataclass(frozen=True)
class Matching:
    """All matches, in the order of the first profile, and what has none."""

    matches: tuple[Match, ...]
    only_first: tuple[Layer, ...]
    only_second: tuple[Layer, ...]


def kind(layer: Layer) -> str:
    """What a layer computes in a form that tools share: `Conv2d(3, 64, …)` and `conv2d` are one."""
    return re.split(r"[^A-Za-z0-9_]", layer.op.strip(), maxsplit=1)[0].lower().strip("_")


def match(first: Profile, second: Profile) -> Matching:
    """Match by name where what they compute does not contradict it, then the rest.

    What is left is aligned in order by kind and bytes of weights (`difflib.SequenceMatcher`), as other tools have other
    names for the same, and then by the weights alone, where there are any. Then a layer takes all whose names begin
    with its own and a dot: the parts of a module.
    """
    others = {layer.name: layer for layer in second.layers}
    found: list[Match] = []
    for layer in first.layers:
        other = others.get(layer.name)
        if other is not None and _agree(layer, other):
            found.append(Match((layer,), (other,), NAME))
    left, right = _rest(first, second, found)
    found += _aligned(left, right, ORDER)
    left, right = _rest(first, second, found)
    found += _aligned(_heavy(left), _heavy(right), WEIGHTS)
    left, right = _rest(first, second, found)
    found += [Match((layer,), parts, MODULE) for layer, parts in _parts(left, right)]
    left, right = _rest(first, second, found)
    found += [Match(parts, (layer,), MODULE) for layer, parts in _parts(right, left)]
    left, right = _rest(first, second, found)
    position = {layer.name: number for number, layer in enumerate(first.layers)}
    found.sort(key=lambda one: position[one.first[0].name])
    return Matching(tuple(found), tuple(left), tuple(right))


def _agree(layer: Layer, other: Layer) -> bool:
    kinds = {kind(layer), kind(other)} - {""}
    return len(kinds) < 2 or 0 < layer.parameter_bytes == other.parameter_bytes


def _rest(first: Profile, second: Profile, found: Sequence[Match]) -> tuple[list[Layer], list[Layer]]:
    mine = {layer.name for one in found for layer in one.first}
    theirs = {layer.name for one in found for layer in one.second}
    return (
        [layer for layer in first.layers if layer.name not in mine],
        [layer for layer in second.layers if layer.name not in theirs],
    )


def _heavy(layers: Sequence[Layer]) -> list[Layer]:
    return [layer for layer in layers if layer.parameter_bytes]


def _aligned(left: Sequence[Layer], right: Sequence[Layer], by: str) -> list[Match]:
    mine, theirs = (
        [(kind(layer) if by == ORDER else "", layer.parameter_bytes) for layer in layers] for layers in (left, right)
    )
    blocks = difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
    return [
        Match((left[block.a + step],), (right[block.b + step],), by) for block in blocks for step in range(block.size)
    ]


def _parts(wholes: Sequence[Layer], parts: Sequence[Layer]) -> list[tuple[Layer, tuple[Layer, ...]]]:
    free = list(parts)
    found = []
    for whole in wholes:
        inside = tuple(layer for layer in free if layer.name.startswith(f"{whole.name}."))
        if inside:
            found.append((whole, inside))
            free = [layer for layer in free if layer not in inside]
    return found
