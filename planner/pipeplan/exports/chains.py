"""A model as DeepSpeed sees it: a list of layers, each of which reads the output of the one before.

Such a list can be cut between two layers if the output of a single layer crosses the cut, and if no later layer reads
the inputs of the model. Outputs that need no gradient may cross too, such as masks and positions: a later stage can
compute them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.errors import InputError
from pipeplan.exports.stacks import member_of
from pipeplan.profile_data import Profile
from pipeplan.profile_layers import Layer


@dataclass(frozen=True)
class Item:
    """One item of the list: layers that no cut may separate."""

    label: str
    """Name of the member of a list of modules, or of the layer, with which the item begins."""
    layers: tuple[str, ...]
    beside: tuple[str, ...] = ()
    """Earlier layers whose outputs cross the beginning of the item too, but need no gradient."""


def chain_of(profile: Profile) -> tuple[Item, ...]:
    """The model of a profile as a list of at least two items. Raises `InputError` if it is not such a list."""
    cuts = _Cuts(profile)
    places = [place for place in range(1, cuts.last_weighty + 1) if not cuts.why_not(place)]
    if not places:
        raise InputError(
            f"{profile.model_name or 'the model'} is no chain of layers, each of which is handed what the one before "
            f"returns: {cuts.example()}"
        )
    items = []
    for first, stop in zip([0, *places], [*places, len(profile.layers)], strict=True):
        layers = tuple(layer.name for layer in profile.layers[first:stop])
        items.append(Item(label_of(profile.layers[first]), layers, cuts.beside(first)))
    return tuple(items)


def label_of(layer: Layer) -> str:
    """The member of a list of modules that a layer belongs to, such as `blocks.3`, or the name of the layer."""
    member = member_of(layer)
    return ".".join(filter(None, (member[0], str(member[1])))) if member else layer.name


class _Cuts:
    """The outputs that cross each place in the order of the layers. Place i is before layer i."""

    def __init__(self, profile: Profile) -> None:
        self._layers = profile.layers
        place = {layer.name: index for index, layer in enumerate(profile.layers)}
        read = {name for tensor in profile.tensors for name in tensor.consumers}
        weighty = [index for index, layer in enumerate(profile.layers) if layer.parameter_bytes]
        self.last_weighty = weighty[-1] if weighty else len(profile.layers) - 1
        """Index of the last layer with weights. The loss comes after it, and reads the targets."""
        self._together = [sorted((place[name], name) for name in group) for group in profile.together if group]
        sources = [place[layer.name] for layer in profile.layers if layer.name not in read]
        self._last_source = max(source for source in sources if source <= self.last_weighty)
        self._spans = [
            (place[tensor.producer], max(map(place.__getitem__, tensor.consumers), default=-1), tensor.gradient_bytes)
            for tensor in profile.tensors
        ]

    def _crossing(self, place: int) -> tuple[list[str], list[str]]:
        """The layers whose outputs cross a place: first those that need a gradient, then the others."""
        crossing: dict[str, bool] = {}
        for producer, last, gradient in self._spans:
            if producer < place <= last:
                name = self._layers[producer].name
                crossing[name] = crossing.get(name, False) or gradient > 0
        learned = [name for name, returned in crossing.items() if returned]
        # After frozen layers no output needs a gradient. All of them then count as the main output.
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
        if before == after and member_of(self._layers[place]):
            return f"{after} is one member of a list"
        return ""

    def beside(self, place: int) -> tuple[str, ...]:
        """The layers whose outputs cross a place without needing a gradient."""
        return tuple(self._crossing(place)[1])

    def example(self) -> str:
        """An example of a reason: the one in the middle of the model."""
        reasons = [self.why_not(place) for place in range(1, self.last_weighty + 1)]
        return reasons[len(reasons) // 2] if reasons else "it has one layer"
