"""Layers that share weights or memory, and the consequences for cuts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeplan.util import graph
from pipeplan.util.typed import Bytes

MOST_NAMED = 3
APART = (
    "under a synchronous schedule (1f1b-flush, gpipe) they may be in several stages, each with a copy of the weights"
)
"""A clause about tied weights that follows `HeldLayers.text`."""


@dataclass(frozen=True)
class TiedWeights:
    """Weights that several layers share, and nothing else: each layer reads all of them."""

    weights: tuple[str, ...]
    """Names of the weights in the model."""
    layers: tuple[str, ...]
    """The layers, in the order of the profile. The parameter bytes of the first layer include the weights."""
    bytes: Bytes


@dataclass(frozen=True)
class HeldLayers:
    """Layers that are in one stage in every plan."""

    group: tuple[str, ...]
    """The layers that have weights or memory in common, in the order of the profile."""
    between: int
    """Number of further layers that lie between the layers of the group, and are therefore in the same stage."""
    others: int
    """Number of all other layers of the profile."""

    def text(self, what: str = "weights or memory") -> str:
        """The consequences for cuts, in one line; `what` is what the layers have in common."""
        between = f" with the {_layers(self.between)} between them" if self.between else ""
        left = f"{_layers(self.others)} can be in other stages" if self.others else "there is no place to cut"
        rest = len(self.group) - MOST_NAMED
        named = [*map(repr, self.group[:MOST_NAMED]), *([f"{rest} more"] if rest > 0 else [])]
        return f"{', '.join(named[:-1])} and {named[-1]} have {what} in common and stay in one stage{between}; {left}"


def held_layers(
    names: Sequence[str], arrows: Iterable[tuple[str, str]], groups: Sequence[Sequence[str]]
) -> list[HeldLayers]:
    """The layers that are in one stage in every plan, because each of these groups must share a stage.

    `names` has all layers of the model in order, and `arrows` its edges (producer, consumer).
    """
    tied = [pair for group in groups for pair in (*itertools.pairwise(group), (group[-1], group[0]))]
    held = []
    for component in graph.strong_components(list(names), [*arrows, *tied]):
        inside = set(component)
        members = {name for group in groups if inside.issuperset(group) for name in group}
        if len(members) > 1:
            named = tuple(name for name in names if name in members)
            held.append(HeldLayers(named, len(inside) - len(named), len(names) - len(inside)))
    return held


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"
