"""Helpers to build a profile from the layers and edges of another tool, which come in no particular order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.util import graph
from pipeplan.util.files import LARGEST


def unique_names(named: Sequence[tuple[int, str]]) -> dict[int, str]:
    """A unique name for every id: its own name where no other node has it, else `name#id`."""
    counts = Counter(name for _, name in named)
    taken: set[str] = set()
    found = {}
    for number, name in named:
        wanted = name if name and counts[name] == 1 else f"{name or 'node'}#{number}"
        while wanted in taken:
            wanted += "'"
        taken.add(wanted)
        found[number] = wanted
    return found


def ordered(layers: Iterable[Layer], tensors: Sequence[Tensor]) -> tuple[Layer, ...]:
    """The layers in a topological order. `Profile` reports cycles."""
    by_name = {layer.name: layer for layer in layers}
    edges = [(tensor.producer, consumer) for tensor in tensors for consumer in tensor.consumers]
    return tuple(by_name[name] for group in graph.strong_components(list(by_name), edges) for name in group)


def without_idle(layers: Sequence[Layer], tensors: Sequence[Tensor]) -> tuple[list[Layer], list[Tensor], list[str]]:
    """Leave out layers without time and weights that pass nothing on: inputs, and outputs without readers.

    Each would only multiply the cuts. Returns the remaining layers and tensors, and the names of the removed layers.
    """
    gone: list[str] = []
    kept, edges = list(layers), list(tensors)
    while True:
        reads = {consumer for tensor in edges for consumer in tensor.consumers}
        sends = Counter[str]()
        carries = Counter[str]()
        for tensor in edges:
            sends[tensor.producer] += 1
            carries[tensor.producer] += tensor.bytes + tensor.gradient_bytes
        idle = {
            layer.name
            for layer in kept
            if layer.forward_s == layer.backward_s == 0
            and layer.parameter_bytes == 0
            and (not sends[layer.name] or (layer.name not in reads and not carries[layer.name]))
        }
        if not idle or len(idle) == len(kept):
            return kept, edges, gone
        gone += [layer.name for layer in kept if layer.name in idle]
        kept = [layer for layer in kept if layer.name not in idle]
        edges = _without(edges, idle)


def _without(tensors: Iterable[Tensor], names: set[str]) -> list[Tensor]:
    found = []
    for tensor in tensors:
        consumers = tuple(name for name in tensor.consumers if name not in names)
        if consumers and tensor.producer not in names:
            found.append(Tensor(tensor.name, tensor.producer, consumers, tensor.bytes, tensor.gradient_bytes))
    return found


def whole_bytes(value: float, where: str) -> int:
    """A size in whole bytes. Other tools write sizes with a fraction; `where` names the value in errors."""
    if value > LARGEST:
        raise InputError(f"{where}: {value:g} bytes cannot be meant")
    return round(value)
