"""Draws the DAG of a model as SVG, for files and for the page of a report, or in Graphviz's dot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeplan.drawing.fold_chains import layer_time_s
from pipeplan.drawing.model_graph import LayerGroup, model_graph
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import templates
from pipeplan.util.text import one_line
from pipeplan.util.units import show_size, show_time

MAX_NAME_LENGTH = 18
"""Most characters of a name in a box. The tooltip shows the full name."""
_COLD, _HOT = (255, 255, 255), (213, 94, 0)
"""White, and the vermilion of the palette of Okabe and Ito."""


def dag_svg(profile: Profile) -> str:
    """A self-contained SVG file with all layers."""
    graph = model_graph(profile, [LayerGroup((layer,), -1) for layer in profile.layers])
    shares = _shares(profile)
    largest = max(shares.values()) or 1.0
    fills = [_colour(shares[layer.name] / largest) for layer in profile.layers]
    return graph_svg(vars(graph), _title(profile), fills)


def graph_svg(graph: Mapping[str, Any], title: str, fills: Sequence[str] = ()) -> str:
    """A drawing of a model as SVG, from the fields of a `ModelGraph`.

    With `fills`, the colours of the nodes, it is a file of its own with a heading; else the styles are those of a page.
    """
    nodes, width = graph["nodes"], graph["w"] - 30
    times = [sum(both) for both in zip(nodes["forward_s"], nodes["backward_s"], strict=True)]
    longest = max(times) or 1.0
    cards = [
        {name: column[at] for name, column in nodes.items()}
        | {
            "fill": fills[at] if fills else "",
            "share": f"{times[at] / longest * width:.1f}",
            "label": _shortened(nodes["name"][at]),
            "line": one_line(f"{_shortened(nodes['op'][at], 14)} · {show_time(times[at])}"),
            "facts": _facts(nodes, at),
        }
        for at in range(len(times))
    ]
    bends = {int(number): points for number, *points in graph["bends"]}
    path = "".join(_edge_path(graph, edge, bends.get(at, [])) for at, edge in enumerate(graph["edges"]))
    return templates.load_template("graph.svg.j2").render(
        graph=graph, title=one_line(title), cards=cards, path=path, alone=bool(fills)
    )


def _facts(nodes: Mapping[str, list[Any]], at: int) -> str:
    """The figures of a layer, one thought a line."""
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
        label = f"{layer.name}\n{show_time(layer_time_s(layer))}, {shares[layer.name]:.1%}"
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
    return f"{profile.model_name}, microbatch {profile.minibatch}: {show_time(profile.total_s)} forward and backward"


def _colour(share: float) -> str:
    """The colour of a share: from white for 0 to vermilion for 1."""
    return "#" + "".join(f"{round(cold + (hot - cold) * share):02x}" for cold, hot in zip(_COLD, _HOT, strict=True))
