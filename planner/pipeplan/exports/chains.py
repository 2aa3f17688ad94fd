"""A model seen as DeepSpeed sees it: a list of layers, each of which is handed what the one before it returns.

A profile's graph is such a chain between two layers if all that crosses from the ones before to the ones after is the
output of one layer, and nothing after reads the model's inputs. What no gradient comes back for may cross besides:
masks and positions, which a later stage can make again.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.errors import InputError
from pipeplan.exports.stacks import member_of
from pipeplan.profile_data import Layer, Profile


@dataclass(frozen=True)
class Item:
    """Layers that no cut may separate."""

    label: str
    """What it begins with: a member of a list of modules, or a layer."""
    layers: tuple[str, ...]
    beside: tuple[str, ...] = ()
    """Layers before it whose outputs it, or an item after it, reads besides; no gradient returns for them."""


def chain_of(profile: Profile) -> tuple[Item, ...]:
    """The model of a profile as a chain of two items at least. Raises `InputError` where it is none."""
    cuts = _Cuts(profile)
    places = [place for place in range(1, cuts.weighty + 1) if not cuts.why_not(place)]
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
    """The member of a list of modules that a layer is in, `blocks.3`, or its own name."""
    member = member_of(layer)
    return ".".join(filter(None, (member[0], str(member[1])))) if member else layer.name


class _Cuts:
    """What crosses a place in the order of the layers: place i is before layer i."""

    def __init__(self, profile: Profile) -> None:
        self._layers = profile.layers
        place = {layer.name: index for index, layer in enumerate(profile.layers)}
        read = {name for tensor in profile.tensors for name in tensor.consumers}
        weighty = [index for index, layer in enumerate(profile.layers) if layer.parameter_bytes]
        self.weighty = weighty[-1] if weighty else len(profile.layers) - 1
        """The last layer with weights: what comes after is the loss, which reads the targets."""
        self._together = [sorted((place[name], name) for name in group) for group in profile.together if group]
        sources = [place[layer.name] for layer in profile.layers if layer.name not in read]
        self._last_source = max(source for source in sources if source <= self.weighty)
        self._spans = [
            (place[tensor.producer], max(map(place.__getitem__, tensor.consumers), default=-1), tensor.gradient_bytes)
            for tensor in profile.tensors
        ]

    def _crossing(self, place: int) -> tuple[list[str], list[str]]:
        """The layers whose outputs cross a place: those that gradients return for, and the others."""
        found: dict[str, bool] = {}
        for producer, last, gradient in self._spans:
            if producer < place <= last:
                name = self._layers[producer].name
                found[name] = found.get(name, False) or gradient > 0
        learned = [name for name, returned in found.items() if returned]
        # Where no gradient returns at all, behind frozen layers, what crosses is the output all the same.
        return (learned, [name for name in found if name not in learned]) if learned else (list(found), [])

    def why_not(self, place: int) -> str:
        """Why the chain cannot be cut at a place; empty if it can."""
        main, _ = self._crossing(place)
        if len(main) != 1:
            name = self._layers[place - 1].name
            return f"behind {name} cross the outputs of {' and '.join(main)}" if main else f"nobody reads {name}"
        if self._last_source >= place:
            return f"{self._layers[self._last_source].name}, further on, reads the model's inputs"
        for group in self._together:
            if group[0][0] < place <= group[-1][0]:
                return f"{group[0][1]} and {group[-1][1]} must share a stage, as they share weights or memory"
        before, after = (label_of(layer) for layer in self._layers[place - 1 : place + 1])
        if before == after and member_of(self._layers[place]):
            return f"{after} is one member of a list"
        return ""

    def beside(self, place: int) -> tuple[str, ...]:
        """What crosses a place besides the one output."""
        return tuple(self._crossing(place)[1])

    def example(self) -> str:
        """The reason in the middle of the model."""
        reasons = [self.why_not(place) for place in range(1, self.weighty + 1)]
        return reasons[len(reasons) // 2] if reasons else "it has one layer"
