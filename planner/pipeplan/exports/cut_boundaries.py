"""The cuts of a model that can be described by naming a module: before the call of the module, or after it.

Trainers that cut at modules run the layers in the order of the model's forward(), which is the order of the profile. A
boundary between two stages is then a place in this order. It must lie where a module begins or ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile


@dataclass(frozen=True)
class ModuleSplit:
    """A boundary between stages, described by a module."""

    module: str
    """Path of the module, as in `named_modules()`."""
    before: bool
    """Whether the boundary is before the module's call. Otherwise it is after it."""


@dataclass(frozen=True)
class ModuleBoundaries:
    """The places for a cut in the order of a profile's layers. Place i is before layer i, for i from 1 on."""

    profile: Profile

    @cached_property
    def place_of(self) -> dict[str, int]:
        """Index of every layer in the order of the profile, by name."""
        return {layer.name: index for index, layer in enumerate(self.profile.layers)}

    @cached_property
    def splits(self) -> dict[int, ModuleSplit]:
        """The places where a module begins or ends, with that module. Modules that are called twice do not count."""
        splits: dict[int, ModuleSplit] = {}
        for path, (first, last) in sorted(self._modules.items(), key=lambda entry: (entry[0].count("."), entry[1])):
            # People find a beginning easier to read than an end, and an outer module easier than one inside it.
            if first and not (first in splits and splits[first].before):
                splits[first] = ModuleSplit(path, before=True)
            splits.setdefault(last + 1, ModuleSplit(path, before=False))
        # The trainer computes the loss, after the model.
        return {place: splits[place] for place in sorted(splits) if place < self._loss}

    @cached_property
    def crossing(self) -> dict[int, frozenset[str]]:
        """The names of the tensors that cross each place in `splits`."""
        spans = [(tensor.name, *self._span(tensor.producer, tensor.consumers)) for tensor in self.profile.tensors]
        return {place: frozenset(name for name, first, last in spans if first < place <= last) for place in self.splits}

    def place(self, before: Sequence[str]) -> int | None:
        """The place that has exactly these layers before it. None if they are not the first layers in the order."""
        return len(before) if {self.place_of[name] for name in before} == set(range(len(before))) else None

    @cached_property
    def entering(self) -> int:
        """Index of the last layer that reads no other layer, and so may read the inputs of the model."""
        fed = {name for tensor in self.profile.tensors for name in tensor.consumers}
        return max(place for name, place in self.place_of.items() if name not in fed)

    @cached_property
    def _loss(self) -> int:
        """Index of the loss layer, or the number of layers if there is none."""
        last = len(self.profile.layers) - 1
        return last if self.profile.layers[last].op == "loss" else last + 1

    @cached_property
    def _modules(self) -> dict[str, tuple[int, int]]:
        """(first, last) index of the layers of every module that is called once and whose layers are consecutive."""
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
    """The paths of the modules around a module, outermost first, and its own."""
    parts = path.split(".") if path else []
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _is_call(layer: Layer) -> bool:
    """Whether a layer is a whole call of its module, rather than an operator inside one."""
    return layer.name.partition("#")[0] == layer.module
