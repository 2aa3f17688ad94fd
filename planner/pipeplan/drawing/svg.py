"""Draws the DAG of a profile as SVG or in Graphviz's dot: one box per layer, coloured by its share of the time."""

from __future__ import annotations

import json

from pipeplan.drawing.dag_layout import layout_dag
from pipeplan.drawing.fold_chains import layer_time_s
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import templates
from pipeplan.util.text import one_line
from pipeplan.util.units import show_size, show_time

BOX, ROW, COLUMN = (190, 34), 54, 206
"""Width and height of a box, and the distances between rows and between columns, in pixels."""
MAX_NAME_LENGTH = 28
"""Most characters of a name in a box. The tooltip shows the full name."""
_COLD, _HOT = (255, 255, 255), (213, 94, 0)
"""White, and the vermilion of the palette of Okabe and Ito."""


def dag_svg(profile: Profile) -> str:
    """A self-contained SVG file."""
    placed = layout_dag(profile)
    width, height = placed.width * COLUMN, placed.ranks * ROW
    shares = _shares(profile)
    largest = max(shares.values()) or 1.0
    boxes = []
    for layer in profile.layers:
        name, (column, rank) = one_line(layer.name), placed.place[layer.name]
        boxes.append(
            {
                "x": f"{column * COLUMN:.0f}",
                "y": rank * ROW,
                "fill": _colour(shares[layer.name] / largest),
                "name": name if len(name) <= MAX_NAME_LENGTH else "…" + name[1 - MAX_NAME_LENGTH :],
                "line": _time_label(layer, shares[layer.name]),
                "title": one_line(f"{layer.name}: {_tooltip(layer, shares[layer.name])}"),
            }
        )
    paths = [_curve([(x * COLUMN + BOX[0] / 2, y * ROW) for x, y in points]) for points in placed.paths.values()]
    return templates.load_template("profile.svg.j2").render(
        title=one_line(_title(profile)), width=width, height=height, box=BOX, boxes=boxes, paths=paths
    )


def _curve(points: list[tuple[float, float]]) -> str:
    """SVG path from below the first box to above the last, with vertical tangents at the points between."""
    (x, y), *rest = points
    y += BOX[1]
    path = f"M{x:.0f},{y:.0f}"
    for number, (to_x, top) in enumerate(rest):
        middle = (y + top) / 2
        path += f" C{x:.0f},{middle:.0f} {to_x:.0f},{middle:.0f} {to_x:.0f},{top:.0f}"
        x, y = to_x, top
        if number < len(rest) - 1:
            y = top + BOX[1]
            path += f" L{x:.0f},{y:.0f}"
    return path


def dag_dot(profile: Profile) -> str:
    """A file for Graphviz, to be drawn with `dot -Tpdf`."""
    shares = _shares(profile)
    largest = max(shares.values()) or 1.0
    number = {layer.name: f"n{index}" for index, layer in enumerate(profile.layers)}
    lines = [
        "digraph profile {",
        f"  label={_quoted(_title(profile))}; labelloc=t; fontname=sans;",
        "  node [shape=box, style=filled, fontname=sans, fontsize=10];",
    ]
    for layer in profile.layers:
        label = f"{layer.name}\n{_time_label(layer, shares[layer.name])}"
        colour = _colour(shares[layer.name] / largest)
        lines.append(f"  {number[layer.name]} [label={_quoted(label)}, fillcolor={_quoted(colour)}];")
    for tensor in profile.tensors:
        for consumer in dict.fromkeys(tensor.consumers):
            label = _quoted(show_size(tensor.bytes))
            lines.append(f"  {number[tensor.producer]} -> {number[consumer]} [tooltip={label}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    """A quoted string of the dot language. Line breaks are escaped, other control characters become blanks."""
    return json.dumps("\n".join(one_line(line) for line in text.split("\n")), ensure_ascii=False)


def _shares(profile: Profile) -> dict[str, float]:
    whole = profile.total_s or 1.0
    return {layer.name: layer_time_s(layer) / whole for layer in profile.layers}


def _title(profile: Profile) -> str:
    return f"{profile.model_name}, minibatch {profile.minibatch}: {show_time(profile.total_s)} forward and backward"


def _time_label(layer: Layer, share: float) -> str:
    return f"{show_time(layer_time_s(layer))}, {share:.1%}"


def _tooltip(layer: Layer, share: float) -> str:
    return (
        f"{layer.op}, forward {show_time(layer.forward_s)}, backward {show_time(layer.backward_s)} ({share:.1%}), "
        f"weights {show_size(layer.parameter_bytes)}, kept {show_size(layer.saved_bytes)}"
    )


def _colour(share: float) -> str:
    """The colour of a share: from white for 0 to vermilion for 1."""
    return "#" + "".join(f"{round(cold + (hot - cold) * share):02x}" for cold, hot in zip(_COLD, _HOT, strict=True))
