"""The model as a DAG coloured by stage: from left to right, in lines like text where it is long.

Layers drawn as one: chains of a stage where a model has many layers, and like blocks where it has very many.

What is drawn as one lies together in a topological order and in one stage, so that no arrow can go back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.drawing.dag_layout import layout
from pipeplan.drawing.fold_chains import Chain, chains, expensive, repeats
from pipeplan.profile_data.layers import Layer, Tensor, edges
from pipeplan.profile_data.profile import Profile
from pipeplan.report.document import Graph, columns
from pipeplan.report.source import Source
from pipeplan.util.text import one_line

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


BOX = (150.0, 34.0)
STEP = (182.0, 50.0)
"""From one rank to the next, and from one node of a rank to the next."""
GAP = 44.0
"""Between two lines of ranks."""
ASPECT = 2.2
"""Width over height that the whole is to have, about."""
_NAMES = ("name", "op", "layers", "stage", "x", "y", "forward_s", "backward_s", "parameter_bytes", "output_bytes")


@dataclass(frozen=True)
class _Lines:
    """Where ranks and places lie, in lines of so many ranks."""

    ranks: int
    """In one line."""
    places: int

    @property
    def height(self) -> float:
        """From one line to the next."""
        return (self.places - 1) * STEP[1] + BOX[1] + GAP

    def corner(self, place: float, rank: int) -> tuple[float, float]:
        """Left and top of a node."""
        line, at = divmod(rank, self.ranks)
        return at * STEP[0], line * self.height + place * STEP[1]

    def middle(self, place: float, rank: int) -> tuple[float, float]:
        """The middle of a node, or a point of an edge."""
        x, y = self.corner(place, rank)
        return x + BOX[0] / 2, y + BOX[1] / 2

    def around(self, upper: tuple[float, int], lower: tuple[float, int]) -> list[tuple[float, float]]:
        """From the end of a line back to the begin of the next, between the two; nothing within one line."""
        line = lower[1] // self.ranks
        if upper[1] // self.ranks == line:
            return []
        between = line * self.height - GAP / 2
        return [(self.ranks * STEP[0] - (STEP[0] - BOX[0]) / 2, between), (-(STEP[0] - BOX[0]) / 2, between)]


def graph(source: Source) -> Graph | None:
    """The picture; None without the profile."""
    if source.known is None:
        return None
    profile = source.known.profile
    stage_of = {name: index for index, stage in enumerate(source.plan.stages) for name in stage.layers}
    found, note = groups(profile, stage_of)
    placed = layout(as_profile(profile, found))
    lines = _lines(placed.ranks, placed.width)
    bends = []
    for edge, points in enumerate(placed.paths.values()):
        passed: list[tuple[float, float]] = []
        for upper, lower in itertools.pairwise(points):
            passed += lines.around(upper, lower)
            passed += [lines.middle(*lower)] if lower is not points[-1] else []
        if passed:
            bends.append([float(edge), *(value for point in passed for value in point)])
    corners = [lines.corner(*placed.place[str(number)]) for number in range(len(found))]
    return Graph(
        width=min(placed.ranks, lines.ranks) * STEP[0] - (STEP[0] - BOX[0]),
        height=math.ceil(placed.ranks / lines.ranks) * lines.height - GAP,
        w=BOX[0],
        h=BOX[1],
        nodes=columns(_NAMES, _rows(profile, found, corners)),
        edges=[(int(producer), int(consumer)) for producer, consumer in placed.paths],
        bends=bends,
        note=note,
    )


def _lines(ranks: int, places: int) -> _Lines:
    """So many ranks in a line that the whole has a shape that fits a page."""
    height = (places - 1) * STEP[1] + BOX[1] + GAP
    lines = max(1, round(math.sqrt(ranks * STEP[0] / (ASPECT * height))))
    return _Lines(math.ceil(ranks / lines), places)


def _rows(profile: Profile, found: Sequence[Group], corners: Sequence[tuple[float, float]]) -> list[Sequence[object]]:
    made = profile.made_bytes()
    rows: list[Sequence[object]] = []
    for group, (x, y) in zip(found, corners, strict=True):
        first, last = one_line(group.layers[0].name), one_line(group.layers[-1].name)
        inside = {layer.name for layer in group.layers}
        rows.append(
            (
                first if len(group.layers) == 1 else f"{first} … {last}",
                one_line(group.layers[0].op) if len(group.layers) == 1 else f"{len(group.layers)} layers",
                len(group.layers),
                group.stage,
                x,
                y,
                sum(layer.forward_s for layer in group.layers),
                sum(layer.backward_s for layer in group.layers),
                sum(layer.parameter_bytes for layer in group.layers),
                made[group.layers[0].name] if len(inside) == 1 else _leaving(profile, inside),
            )
        )
    return rows


def _leaving(profile: Profile, inside: set[str]) -> int:
    """Bytes that others read of some layers."""
    return sum(
        tensor.bytes
        for tensor in profile.tensors
        if tensor.producer in inside and any(reader not in inside for reader in tensor.consumers)
    )
