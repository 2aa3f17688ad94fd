"""The model as a DAG coloured by stage: from left to right, in lines like text where it is long."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.picture.layout import layout
from pipeplan.profile_data import Profile
from pipeplan.report.document import Graph, columns
from pipeplan.report.fold import Group, as_profile, groups
from pipeplan.report.source import Source
from pipeplan.text import one_line

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
