"""The places at which trainers can cut a model whose layers run in the order of its forward().

torch.distributed.pipelining cuts before or after the call of a module (`ModuleBoundaries`). DeepSpeed takes a list of
layers, in which each layer reads the output of the previous one (`chain_of`). Such a list can be cut between two layers
if the output of only one layer crosses the cut, and if no later layer reads the inputs of the model. Outputs without a
gradient, such as masks and positions, may cross too: a later stage can compute them again. The stages of a plan must
follow the order of the model's forward(), which is the order of the profile.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan.errors import InputError
from pipeplan.exports.target import ExportTarget, refusal
from pipeplan.plan.plan import Plan
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.fsdp_units import list_member
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile


@dataclass(frozen=True)
class ModuleSplit:
    """A boundary between stages, described by a module."""

    module: str
    """Path of the module, as in `named_modules()`."""
    before: bool
    """Whether the boundary is before the module's call, instead of after it."""


@dataclass(frozen=True)
class ModuleBoundaries:
    """The possible places of a cut in the order of a profile's layers. Place i, from 1 on, is before layer i."""

    profile: Profile

    @cached_property
    def place_of(self) -> dict[str, int]:
        """Index of every layer in the order of the profile, by name."""
        return {layer.name: index for index, layer in enumerate(self.profile.layers)}

    @cached_property
    def splits(self) -> dict[int, ModuleSplit]:
        """The places where a module begins or ends, with the module. Modules that are called twice do not count."""
        splits: dict[int, ModuleSplit] = {}
        for path, (first, last) in sorted(self._modules.items(), key=lambda entry: (entry[0].count("."), entry[1])):
            # A beginning is easier to read than an end, and an outer module is easier to read than an inner one.
            if first and not (first in splits and splits[first].before):
                splits[first] = ModuleSplit(path, before=True)
            splits.setdefault(last + 1, ModuleSplit(path, before=False))
        # The trainer computes the loss, after the model.
        return {place: splits[place] for place in sorted(splits) if place < self._loss}

    @cached_property
    def crossing(self) -> dict[int, frozenset[str]]:
        """The names of the tensors that cross each place in `splits`."""
        spans = [(tensor.name, *_span(tensor, self.place_of)) for tensor in self.profile.tensors]
        return {place: frozenset(name for name, first, last in spans if first < place <= last) for place in self.splits}

    def place(self, before: Sequence[str]) -> int | None:
        """The place with exactly these layers before it; None if they are not the first layers in the order."""
        return len(before) if {self.place_of[name] for name in before} == set(range(len(before))) else None

    @cached_property
    def entering(self) -> int:
        """Index of the last layer that reads no other layer. Such a layer may read the inputs of the model."""
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
        # A layer may be a whole call of its module, or an operator inside one.
        calls = Counter(layer.module for layer in self.profile.layers if layer.name.partition("#")[0] == layer.module)
        repeated = {path for layer, count in calls.items() if count > 1 for path in _around(layer)}
        return {
            path: (places[0], places[-1])
            for path, places in inside.items()
            if path not in repeated and places[-1] - places[0] + 1 == len(places)
        }


def _around(path: str) -> list[str]:
    """The paths of the modules around a module, outermost first, and the module's own path."""
    return list(itertools.accumulate(path.split("."), "{}.{}".format)) if path else []


def _span(tensor: Tensor, place_of: Mapping[str, int]) -> tuple[int, int]:
    """(place of the layer that makes a tensor, place of the last layer that reads it; -1 if no layer does)."""
    return place_of[tensor.producer], max(map(place_of.__getitem__, tensor.consumers), default=-1)


def cut_places(target: ExportTarget, boundaries: ModuleBoundaries, problem: Problem, plan: Plan) -> list[int]:
    """The places at which a plan cuts the order of the layers.

    Raises `InputError` if stages do not follow this order, if a boundary is not in `boundaries.splits`, or if a tensor
    skips a stage.
    """
    places: list[int] = []
    before: list[str] = []
    for number, stage in enumerate(plan.stages[:-1], start=1):
        before += stage.layers
        place = boundaries.place(before)
        if place is None:
            raise refusal(target, plan, f"the layers of stages 1 to {number} are not the first that the model computes")
        if place not in boundaries.splits:
            left, right = (problem.profile.layers[index].name for index in (place - 1, place))
            reason = f"it cuts between {left!r} and {right!r}, where no module that is called once begins or ends"
            raise refusal(target, plan, reason)
        places.append(place)
    for place, following in itertools.pairwise(places):
        skipping = boundaries.crossing[place] & boundaries.crossing[following]
        if skipping:
            passed = places.index(following) + 1
            raise refusal(target, plan, f"the tensor {min(skipping)!r} skips stage {passed} on its way to a later one")
    return places


def restrict_to_places(
    target: ExportTarget, boundaries: ModuleBoundaries, places: Sequence[int], options: Options
) -> Options:
    """The options, restricted so that stages begin only at these places. Raises `InputError` if there are no places."""
    if not boundaries.splits:
        raise InputError(f"{target.title} cuts at modules, and the profile does not name the modules of its layers")
    if not places:
        raise InputError(
            f"{target.title} cannot cut this model: a tensor would skip a stage wherever its modules begin"
        )
    names = [layer.name for layer in boundaries.profile.layers]
    groups = (tuple(names[first:stop]) for first, stop in itertools.pairwise([0, *places, len(names)]))
    return replace(options, together=(*options.together, *(group for group in groups if len(group) > 1)))


def compatible_places(boundaries: ModuleBoundaries, options: Options) -> list[int]:
    """Places that can all be cut at once: every tensor is read only by the stage that makes it, or by the next stage.

    A tensor then crosses at most one of the places. All places come after the last layer that reads no other layer,
    because that layer may read the inputs of the model, which only the first stage gets. If places exclude each other,
    places that a single tensor crosses are taken first, then places with the fewest bytes. This greedy choice may not
    be the best. A plan of two stages has only one boundary, so all places are possible for it.
    """
    entering = boundaries.entering
    possible = [place for place in boundaries.splits if place > entering and boundaries.crossing[place]]
    if 2 in (options.stages, options.max_stages):
        return possible
    size = {tensor.name: tensor.bytes + tensor.gradient_bytes for tensor in boundaries.profile.tensors}
    taken: set[str] = set()
    chosen = []

    def cost(place: int) -> tuple[bool, int]:
        names = boundaries.crossing[place]
        return len(names) > 1, sum(map(size.__getitem__, names))

    for place in sorted(possible, key=cost):
        if not boundaries.crossing[place] & taken:
            taken |= boundaries.crossing[place]
            chosen.append(place)
    return sorted(chosen)


@dataclass(frozen=True)
class ChainItem:
    """One item of the list: layers that no cut may separate."""

    label: str
    """Name of the member of a list of modules, or of the layer, with which the item begins."""
    layers: tuple[str, ...]
    beside: tuple[str, ...] = ()
    """Earlier layers whose outputs also cross the beginning of the item, but need no gradient."""


def chain_of(profile: Profile, prefix: str = "") -> tuple[ChainItem, ...]:
    """The model of a profile as a list of at least two items, else an `InputError` that begins with `prefix`."""
    cuts = _Cuts(profile)
    places = [place for place in range(1, cuts.last_weighty + 1) if not cuts.why_not(place)]
    if not places:
        raise InputError(
            f"{prefix}{profile.model_name or 'the model'} is not a chain, in which each layer reads only the output of "
            f"the layer before it: {cuts.example()}"
        )
    items = []
    for first, stop in zip([0, *places], [*places, len(profile.layers)], strict=True):
        layers = tuple(layer.name for layer in profile.layers[first:stop])
        items.append(ChainItem(label_of(profile.layers[first]), layers, cuts.beside(first)))
    return tuple(items)


def label_of(layer: Layer) -> str:
    """The member of a list of modules that a layer belongs to, such as `blocks.3`, or the name of the layer."""
    member = list_member(layer)
    return ".".join(filter(None, (member[0], str(member[1])))) if member else layer.name


class _Cuts:
    """The outputs that cross each place in the order of the layers. Place i is before layer i."""

    def __init__(self, profile: Profile) -> None:
        self._layers = profile.layers
        place = {layer.name: index for index, layer in enumerate(profile.layers)}
        read = {name for tensor in profile.tensors for name in tensor.consumers}
        weighty = [index for index, layer in enumerate(profile.layers) if layer.weight_bytes]
        self.last_weighty = weighty[-1] if weighty else len(profile.layers) - 1
        """Index of the last layer with weights. The loss comes after it, and reads the targets."""
        groups = [*profile.together, *(tie.layers for tie in profile.tied)]
        self._together = [sorted((place[name], name) for name in group) for group in groups if group]
        sources = [place[layer.name] for layer in profile.layers if layer.name not in read]
        self._last_source = max(source for source in sources if source <= self.last_weighty)
        self._spans = [(*_span(tensor, place), tensor.gradient_bytes) for tensor in profile.tensors]

    def _crossing(self, place: int) -> tuple[list[str], list[str]]:
        """(layers whose outputs cross a place and need a gradient, other layers whose outputs cross it)."""
        crossing: dict[str, bool] = {}
        for producer, last, gradient in self._spans:
            if producer < place <= last:
                name = self._layers[producer].name
                crossing[name] = crossing.get(name, False) or gradient > 0
        learned = [name for name, returned in crossing.items() if returned]
        # After frozen layers no output needs a gradient. All outputs then count as the main output.
        return (learned, [name for name in crossing if name not in learned]) if learned else (list(crossing), [])

    def why_not(self, place: int) -> str:
        """The reason why the list cannot be cut at a place; empty if it can."""
        main, _ = self._crossing(place)
        if len(main) != 1:
            name = self._layers[place - 1].name
            return f"after {name} the outputs of {' and '.join(main)} cross" if main else f"no layer reads {name}"
        if self._last_source >= place:
            return f"{self._layers[self._last_source].name}, a later layer, reads the model's inputs"
        for group in self._together:
            if group[0][0] < place <= group[-1][0]:
                return f"{group[0][1]} and {group[-1][1]} must share a stage, as they share weights or memory"
        before, after = (label_of(layer) for layer in self._layers[place - 1 : place + 1])
        if before == after and list_member(self._layers[place]):
            return f"{after} is one member of a list"
        return ""

    def beside(self, place: int) -> tuple[str, ...]:
        """The layers whose outputs cross a place but need no gradient."""
        return tuple(self._crossing(place)[1])

    def example(self) -> str:
        """An example of a reason, taken from the middle of the model."""
        reasons = [self.why_not(place) for place in range(1, self.last_weighty + 1)]
        return reasons[len(reasons) // 2] if reasons else "it has one layer"
