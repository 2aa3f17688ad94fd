"""A model as Megatron-LM sees it: a list of equal blocks, between an embedding and a head.

Only the paths of the modules matter: `transformer.h.3.ln_1` is a layer of block 3 of the list `transformer.h`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import InputError
from pipeplan.profile_data.fsdp_units import list_member
from pipeplan.profile_data.layers import Layer, edges
from pipeplan.profile_data.profile import Profile

# Operators that no transformer has. `Conv1D`, in GPT-2 of the library transformers, is a linear layer.
_FOREIGN = re.compile(r"(LSTM|GRU|RNN|ConvTranspose|Conv[123]d)", re.ASCII)


@dataclass(frozen=True)
class BlockStack:
    """The layers of a model in three parts, by name."""

    path: str
    """Path of the list of blocks, such as `transformer.h`."""
    before: tuple[str, ...]
    """The embedding, and everything else that the blocks read outside of the list."""
    blocks: tuple[tuple[str, ...], ...]
    after: tuple[str, ...]
    """The head and the loss."""

    def named_parts(self) -> dict[str, tuple[str, ...]]:
        """The groups of layers in order, by a name for messages. Cuts are possible only between groups."""
        blocks = {f"{self.path}.{index}": names for index, names in enumerate(self.blocks)}
        return {"the embedding": self.before, **blocks, "the head": self.after}

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The parts with more than one layer. The layers of a part share a stage."""
        return tuple(names for names in self.named_parts().values() if len(names) > 1)


def stack_of(profile: Profile, prefix: str = "") -> BlockStack:
    """The model of a profile as a stack, else an `InputError` that begins with `prefix` and says what is missing."""
    lists = _lists(profile)
    alike = {path: blocks for path, blocks in lists.items() if not _why_not(profile, path, blocks)}
    if len(alike) != 1:
        raise InputError(f"{prefix}{_no_stack(profile)}: {_found(profile, lists)}")
    path, blocks = next(iter(alike.items()))
    before, after = _around(profile, blocks)
    for side, names in (("before", before), ("after", after)):
        if not any(layer.weight_bytes for layer in profile.layers if layer.name in names):
            raise InputError(f"{prefix}{_no_stack(profile)}: {side} the blocks of {path} no layer has weights")
    return BlockStack(path, before, tuple(tuple(layer.name for layer in block) for block in blocks), after)


def all_groups(profile: Profile) -> list[tuple[str, ...]]:
    """The groups of layers of a profile that share weights or memory."""
    return [*profile.together, *(tie.layers for tie in profile.tied)]


def shared_weights(groups: Iterable[Sequence[str]], stack: BlockStack) -> tuple[str, str] | None:
    """(layer before the blocks, layer after the blocks) that are in one group; None if there is no such pair."""
    ends = (set(stack.before), set(stack.after))
    for group in groups:
        first, last = ([name for name in group if name in end] for end in ends)
        if first and last:
            return first[0], last[0]
    return None


def _lists(profile: Profile) -> dict[str, list[list[Layer]]]:
    """The layers of every list of modules by member, for lists of two or more members 0, 1, 2 …"""
    lists: dict[str, dict[int, list[Layer]]] = {}
    for layer in profile.layers:
        if member := list_member(layer):
            lists.setdefault(member[0], {}).setdefault(member[1], []).append(layer)
    return {
        path: [members[index] for index in range(len(members))]
        for path, members in lists.items()
        if len(members) > 1 and set(members) == set(range(len(members)))
    }


def _why_not(profile: Profile, path: str, blocks: list[list[Layer]]) -> str:
    """The reason why a list of modules cannot be the blocks; empty if it can."""
    shapes = [
        frozenset((layer.name.removeprefix(f"{path}.{place}"), layer.op) for layer in block)
        for place, block in enumerate(blocks)
    ]
    if len(set(shapes)) > 1:
        place = next(place for place, shape in enumerate(shapes) if shape != shapes[0])
        return f"{path}.{place} is not like {path}.0"
    if not any(layer.weight_bytes for layer in blocks[0]):
        return "without weights"
    for layer in blocks[0]:
        if _FOREIGN.match(layer.op):
            return f"{layer.op} is not of a transformer"
    return _strays(profile, blocks)


def _strays(profile: Profile, blocks: list[list[Layer]]) -> str:
    """Text on a layer between the blocks, or on an output that skips a block; empty if neither exists."""
    place = {layer.name: index for index, block in enumerate(blocks) for layer in block}
    before, after = _reaching(profile, set(place)), _closure(set(place), edges(profile.tensors))
    for layer in profile.layers:
        if layer.name not in place and layer.name in before and layer.name in after:
            return f"{layer.name} lies between its blocks"
    for tensor in profile.tensors:
        if tensor.producer in place and tensor.gradient_bytes:
            furthest = max((place.get(name, len(blocks)) for name in tensor.consumers), default=0)
            if furthest > place[tensor.producer] + 1:
                return f"{tensor.producer} is read after the next block"
    return ""


def _around(profile: Profile, blocks: list[list[Layer]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(layers that the blocks read, all other layers), both outside of the blocks and in the order of the profile."""
    inside = {layer.name for block in blocks for layer in block}
    before = _reaching(profile, inside)
    rest = [layer.name for layer in profile.layers if layer.name not in inside]
    return tuple(name for name in rest if name in before), tuple(name for name in rest if name not in before)


def _reaching(profile: Profile, names: set[str]) -> set[str]:
    """These layers and all layers that they depend on."""
    return _closure(names, [(reader, producer) for producer, reader in edges(profile.tensors)])


def _closure(names: set[str], arrows: Iterable[tuple[str, str]]) -> set[str]:
    """These layers and all layers that can be reached from them along arrows."""
    following: dict[str, list[str]] = {}
    for source, target in arrows:
        following.setdefault(source, []).append(target)
    closed, waiting = set(names), list(names)
    while waiting:
        for name in following.get(waiting.pop(), ()):
            if name not in closed:
                closed.add(name)
                waiting.append(name)
    return closed


def _no_stack(profile: Profile) -> str:
    name = profile.model_name or "the model"
    return f"{name} is no list of blocks that are all alike (`layers.0`, `layers.1`, …) between an embedding and a head"


def _found(profile: Profile, lists: Mapping[str, list[list[Layer]]]) -> str:
    if not lists:
        return "the paths of its modules name no list"
    reasons = []
    for path, blocks in lists.items():
        reason = _why_not(profile, path, blocks)
        reasons.append(f"{path or 'the model'} has {len(blocks)}{f' ({reason})' if reason else ''}")
    return "; ".join([*reasons[:4], *(["…"] if len(reasons) > 4 else [])])
