"""The drawing of a model wraps like text, and a line is only as high as what is in it."""

from __future__ import annotations

from pipeplan.drawing.model_graph import LINE_GAP, NODE_DISTANCE, NODE_SIZE, RANKS_IN_LINE, layer_groups, model_graph
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

BRANCHES = 5


def _broom() -> Profile:
    """A chain that fills one line, and then layers that all read its last one."""
    names = [f"chain{number}" for number in range(RANKS_IN_LINE)]
    ends = [f"end{number}" for number in range(BRANCHES)]
    tensors = [Tensor(f"{name}.out", name, (names[at + 1],), 10, 10) for at, name in enumerate(names[:-1])]
    tensors.append(Tensor("last", names[-1], tuple(ends), 10, 10))
    layers = tuple(Layer(name, 1e-3, 1e-3, 10, 10) for name in [*names, *ends])
    return Profile(layers=layers, tensors=tuple(tensors), minibatch=1)


def test_a_line_is_as_high_as_its_widest_rank() -> None:
    profile = _broom()
    graph = model_graph(profile, *layer_groups(profile, {layer.name: 0 for layer in profile.layers}))
    tops = dict(zip(graph.nodes["name"], graph.nodes["y"], strict=True))
    assert {tops[f"chain{number}"] for number in range(RANKS_IN_LINE)} == {0}
    second = NODE_SIZE[1] + LINE_GAP
    assert sorted(tops[f"end{number}"] for number in range(BRANCHES)) == [
        second + number * NODE_DISTANCE[1] for number in range(BRANCHES)
    ]
    assert graph.height == second + (BRANCHES - 1) * NODE_DISTANCE[1] + NODE_SIZE[1]
    assert len(graph.bends) == BRANCHES, "each of these edges goes around to the next line"
    assert all(points[2] == points[4] == NODE_SIZE[1] + LINE_GAP / 2 for points in graph.bends)
