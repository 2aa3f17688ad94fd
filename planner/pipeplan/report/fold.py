"""Layers drawn as one: chains of a stage where a model has many layers, and like blocks where it has very many.

What is drawn as one lies together in a topological order and in one stage, so that no arrow can go back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.picture.chains import Chain, chains, expensive
from pipeplan.picture.repeats import repeats
from pipeplan.profile_data import Profile
from pipeplan.profile_layers import Layer, Tensor, edges

FEW, MANY = 120, 400
"""Layers up to which each is drawn, and nodes up to which each chain is."""


@dataclass(frozen=True)
class Group:
    """Layers of one stage that are drawn as one."""

    layers: tuple[Layer, ...]
    stage: int


def groups(profile: Profile, stage_of: Mapping[str, int]) -> tuple[list[Group], str]:
    """What is drawn, in a topological order, and a sentence on what was drawn as one."""
    if len(profile.layers) <= FEW:
        return [Group((layer,), stage_of[layer.name]) for layer in profile.layers], ""
    found = _by_stage(chains(profile, expensive(profile)), stage_of)
    note = "Layers that follow each other in one stage are drawn as one, but for the most expensive."
    if len(found) > MANY:
        found = _by_stage(_folded(chains(profile)), stage_of)
        note = "Layers of one stage that follow each other, and blocks that are alike, are drawn as one."
    if len(found) > MANY:
        found = list(_packed(found, -(-len(found) // MANY)))
    return found, note if len(found) < len(profile.layers) else ""


def _by_stage(found: Iterable[Chain | Sequence[Layer]], stage_of: Mapping[str, int]) -> list[Group]:
    """Each chain cut where its layers are in different stages."""
    made = []
    for one in found:
        layers = one.layers if isinstance(one, Chain) else one
        for stage, mine in itertools.groupby(layers, key=lambda layer: stage_of[layer.name]):
            made.append(Group(tuple(mine), stage))
    return made


def _folded(plain: Sequence[Chain]) -> Iterator[Sequence[Layer]]:
    """The chains, but all of the blocks that repeat one as a single run of layers."""
    at = 0
    for run in repeats(plain):
        first = run.start + run.period
        yield from (chain.layers for chain in plain[at:first])
        yield [layer for chain in plain[first : run.end] for layer in chain.layers]
        at = run.end
    yield from (chain.layers for chain in plain[at:])


def _packed(found: Sequence[Group], most: int) -> Iterator[Group]:
    """Up to so many neighbours of one stage made one."""
    for stage, mine in itertools.groupby(found, key=lambda group: group.stage):
        members = list(mine)
        for at in range(0, len(members), most):
            yield Group(tuple(layer for group in members[at : at + most] for layer in group.layers), stage)


def as_profile(profile: Profile, found: Sequence[Group]) -> Profile:
    """The groups as a profile of their own, each by its number, to be placed like one."""
    home = {layer.name: str(number) for number, group in enumerate(found) for layer in group.layers}
    arrows = dict.fromkeys((home[source], home[target]) for source, target in edges(profile.tensors))
    joined = [arrow for arrow in arrows if arrow[0] != arrow[1]]
    return Profile(
        layers=tuple(Layer(str(number), 0.0, 0.0, 0, 0) for number in range(len(found))),
        tensors=tuple(Tensor(f"{at}", source, (target,), 0, 0) for at, (source, target) in enumerate(joined)),
        minibatch=1,
    )
