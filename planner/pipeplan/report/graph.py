"""The model as a DAG coloured by stage: every layer, or chains of them where they are very many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.picture.layout import Layout, layout
from pipeplan.profile import Layer
from pipeplan.report.document import Graph, columns
from pipeplan.report.source import Source
from pipeplan.text import one_line

MOST_NODES = 400
BOX = (150.0, 34.0)
STEP = (176.0, 52.0)
"""From one rank to the next, and from one node of a rank to the next."""
_NAMES = ("name", "op", "layers", "stage", "x", "y", "forward_s", "backward_s", "parameter_bytes", "output_bytes")


@dataclass(frozen=True)
class Node:
    """A layer, or several that follow each other in one stage."""

    layers: tuple[Layer, ...]
    stage: int


def graph(source: Source) -> Graph | None:
    """The picture; None without the profile."""
    if source.known is None:
        return None
    profile = source.known.profile
    stage_of = {name: index for index, stage in enumerate(source.plan.stages) for name in stage.layers}
    placed = layout(profile)
    nodes = [Node((layer,), stage_of[layer.name]) for layer in profile.layers]
    made = profile.made_bytes()
    rows = []
    for node in nodes:
        column, rank = placed.place[node.layers[0].name]
        rows.append(_row(node, column, rank, made))
    number = {layer.name: index for index, layer in enumerate(profile.layers)}
    edges = [(number[source], number[target]) for source, target in placed.paths]
    return Graph(
        width=placed.ranks * STEP[0],
        height=placed.width * STEP[1],
        w=BOX[0],
        h=BOX[1],
        nodes=columns(_NAMES, rows),
        edges=edges,
        bends=_bends(placed),
        note="",
    )


def _row(node: Node, column: float, rank: int, made: dict[str, int]) -> Sequence[object]:
    first, last = one_line(node.layers[0].name), one_line(node.layers[-1].name)
    return (
        first if len(node.layers) == 1 else f"{first} … {last}",
        one_line(node.layers[0].op),
        len(node.layers),
        node.stage,
        rank * STEP[0],
        column * STEP[1],
        sum(layer.forward_s for layer in node.layers),
        sum(layer.backward_s for layer in node.layers),
        sum(layer.parameter_bytes for layer in node.layers),
        made[node.layers[-1].name],
    )


def _bends(placed: Layout) -> list[list[float]]:
    found = []
    for edge, points in enumerate(placed.paths.values()):
        if len(points) > 2:
            middle = [(rank * STEP[0] + BOX[0] / 2, column * STEP[1] + BOX[1] / 2) for column, rank in points[1:-1]]
            found.append([float(edge), *(value for point in middle for value in point)])
    return found
