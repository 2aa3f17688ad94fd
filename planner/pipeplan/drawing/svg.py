"""Draws the DAG of a model as SVG, for the page of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeplan.rendering import templates
from pipeplan.util.text import one_line
from pipeplan.util.units import show_size, show_time

MAX_NAME_LENGTH = 18
"""Largest number of characters of a name in a box. The tooltip shows the full name."""


def graph_svg(graph: Mapping[str, Any], title: str) -> str:
    """A drawing of a model as SVG, from the fields of a `ModelGraph`, with the styles of the page around it."""
    nodes, width = graph["nodes"], graph["w"] - 30
    times = [sum(both) for both in zip(nodes["forward_s"], nodes["backward_s"], strict=True)]
    longest = max(times) or 1.0
    cards = [
        {name: column[at] for name, column in nodes.items()}
        | {
            "share": f"{times[at] / longest * width:.1f}",
            "label": _shortened(nodes["name"][at]),
            "line": one_line(f"{_shortened(nodes['op'][at], 14)} · {show_time(times[at])}"),
            "facts": _facts(nodes, at),
        }
        for at in range(len(times))
    ]
    bends = {int(number): points for number, *points in graph["bends"]}
    path = "".join(_edge_path(graph, edge, bends.get(at, [])) for at, edge in enumerate(graph["edges"]))
    return templates.load_template("graph.svg.j2").render(graph=graph, title=one_line(title), cards=cards, path=path)


def _facts(nodes: Mapping[str, list[Any]], at: int) -> str:
    """The figures of a layer, one group a line."""
    stage = "" if nodes["stage"][at] < 0 else f"stage {nodes['stage'][at] + 1}, "
    times = f"forward {show_time(nodes['forward_s'][at])}, backward {show_time(nodes['backward_s'][at])}"
    sizes = f"parameters {show_size(nodes['parameter_bytes'][at])}, output {show_size(nodes['output_bytes'][at])}"
    name, op = one_line(nodes["name"][at]), one_line(nodes["op"][at])
    return f"{name}\n{stage}{op}\n{times}\n{sizes}"


def _edge_path(graph: Mapping[str, Any], edge: Sequence[int], bends: Sequence[float]) -> str:
    """An edge from the right of its producer, through the bends of a long edge, to the left of its consumer.

    Edges are curves. An edge from the end of a line of ranks to the start of the next one has corners.
    """
    (producer, consumer), nodes, middle = edge, graph["nodes"], graph["h"] / 2
    x, y = nodes["x"][producer] + graph["w"], nodes["y"][producer] + middle
    path = f"M{x:g},{y:g}"
    ends = nodes["x"][consumer], nodes["y"][consumer] + middle
    for to_x, to_y in [*zip(bends[::2], bends[1::2], strict=True), ends]:
        if y == to_y:
            path += f"H{to_x:g}"
        elif to_x > graph["width"]:
            path += f"H{to_x:g}V{to_y:g}"
        elif x < 0:
            path += f"V{to_y:g}H{to_x:g}"
        else:
            half = (x + to_x) / 2
            path += f"C{half:g},{y:g} {half:g},{to_y:g} {to_x:g},{to_y:g}"
        x, y = to_x, to_y
    return path


def _shortened(name: str, most: int = MAX_NAME_LENGTH) -> str:
    name = one_line(name)
    return name if len(name) <= most else "…" + name[1 - most :]
