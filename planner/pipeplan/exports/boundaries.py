"""Where a model can be cut by naming a module: before the call of one, or after it.

Trainers that cut at modules run the layers in the order of the model's own forward(), which is that of the profile. A
boundary between two stages is then a place in this order, and must lie where a module begins or ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan.profile_data import Layer, Profile


@dataclass(frozen=True)
class Split:
    """A boundary, told by a module."""

    module: str
    """Its path, as in `named_modules()`."""
    before: bool
    """Whether the boundary is before the module's call, or after it."""


@dataclass(frozen=True)
class Boundaries:
    """The places in the order of a profile's layers: place i is before layer i, for i from 1 on."""

    profile: Profile

    @cached_property
    def place_of(self) -> dict[str, int]:
        """The place of every layer in the order of the profile."""
        return {layer.name: index for index, layer in enumerate(self.profile.layers)}

    @cached_property
    def splits(self) -> dict[int, Split]:
        """The places where a module that is called once begins or ends, and which."""
        found: dict[int, Split] = {}
        for path, (first, last) in sorted(self._modules.items(), key=lambda one: (one[0].count("."), one[1])):
            # A beginning says more than an end, and an outer module more than one inside it.
            if first and not (first in found and found[first].before):
                found[first] = Split(path, before=True)
            found.setdefault(last + 1, Split(path, before=False))
        # The loss is computed by the trainer, after the model.
        return {place: found[place] for place in sorted(found) if place < self._loss}

    @cached_property
    def crossing(self) -> dict[int, frozenset[str]]:
        """For every place in `splits` the tensors that cross it, by name."""
        spans = [(tensor.name, *self._span(tensor.producer, tensor.consumers)) for tensor in self.profile.tensors]
        return {place: frozenset(name for name, first, last in spans if first < place <= last) for place in self.splits}

    def place(self, before: Sequence[str]) -> int | None:
        """The place that has exactly these layers before it, or None where they are not the first in the order."""
        return len(before) if {self.place_of[name] for name in before} == set(range(len(before))) else None

    @cached_property
    def entering(self) -> int:
        """The last place of a layer that reads no other: it may read the model's inputs."""
        fed = {name for tensor in self.profile.tensors for name in tensor.consumers}
        return max(place for name, place in self.place_of.items() if name not in fed)

    @cached_property
    def _loss(self) -> int:
        """The place of the layer that consumes the outputs."""
        last = len(self.profile.layers) - 1
        return last if self.profile.layers[last].op == "loss" else last + 1

    @cached_property
    def _modules(self) -> dict[str, tuple[int, int]]:
        """(first, last) layer of every module that is called once, whose layers stand together."""
        inside: dict[str, list[int]] = {}
        for index, layer in enumerate(self.profile.layers):
            for path in _around(layer.module):
                inside.setdefault(path, []).append(index)
        calls = Counter(layer.module for layer in self.profile.layers if _is_call(layer))
        repeated = {path for layer, count in calls.items() if count > 1 for path in _around(layer)}
        return {
            path: (places[0], places[-1])
            for path, places in inside.items()
            if path not in repeated and places[-1] - places[0] + 1 == len(places)
        }

    def _span(self, producer: str, consumers: Sequence[str]) -> tuple[int, int]:
        return self.place_of[producer], max(map(self.place_of.__getitem__, consumers), default=-1)


def _around(path: str) -> Iterator[str]:
    """The path of a module, and of all that it is in, outermost first."""
    parts = path.split(".") if path else []
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _is_call(layer: Layer) -> bool:
    """Whether a layer is one call of its module, and not an operator inside one."""
    return layer.name.partition("#")[0] == layer.module
