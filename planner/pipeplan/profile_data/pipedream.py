"""The text format of PipeDream's profiler (graph.txt of github.com/msr-fiddle/pipedream).

A node line is `id -- description -- forward_compute_time=…, backward_compute_time=…, activation_size=…,
parameter_size=…`, optionally ` -- stage_id=…`; an edge line begins with a tab. Times are milliseconds, sizes bytes; an
activation size may be a list `[a; b]`, to be summed. (Read by `Graph.from_str` and `Node.from_str` of that repository's
graph/graph.py.)
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from pipeplan._version import __version__
from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Layer, Provenance, Tensor
from pipeplan.profile_data.profile import LARGEST_MINIBATCH, Profile
from pipeplan.util import graph
from pipeplan.util.files import read_text

_NUMBER = r"-?(?:[0-9.]+(?:[eE][+-]?[0-9]+)?|nan|inf)"
_NODE = re.compile(
    rf"(?P<id>\S+) -- (?P<description>.*) -- forward_compute_time=(?P<forward>{_NUMBER}), "
    rf"backward_compute_time=(?P<backward>{_NUMBER}), activation_size=(?P<activation>\[.*?\]|{_NUMBER}), "
    rf"parameter_size=(?P<parameter>{_NUMBER})(?: -- stage_id=\S+)?\s*"
)
_EDGE = re.compile(r"\t(\S+) -- (\S+)\s*")


def read_pipedream_profile(path: Path, minibatch: int | None, device_name: str = "") -> Profile:
    """Read a graph.txt that was measured with `minibatch` samples, which the format does not state.

    `Input*` nodes are data loading, and `__getitem__` nodes without readers do no work; both are left out. The format
    lacks the bytes saved for backward. The bytes of a layer's output are taken instead, and 0 for an in-place ReLU,
    which shares the memory of its input. Raises `InputError` if the file or the minibatch size is unusable.
    """
    if minibatch is None:
        raise InputError(
            f"{path} does not say how many samples its times are for: give --microbatch, as in --microbatch 64"
        )
    if not 1 <= minibatch <= LARGEST_MINIBATCH:
        raise InputError(f"--microbatch must be at least 1 and at most {LARGEST_MINIBATCH}, not {minibatch}")
    nodes: dict[str, tuple[str, Layer, int]] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        where = f"{path}, line {number}"
        if edge := _EDGE.fullmatch(line):
            edges.append((edge[1], edge[2]))
        elif node := _NODE.fullmatch(line):
            if node["id"] in nodes:
                raise InputError(f"{where}: node {node['id']!r} appears twice")
            nodes[node["id"]] = _node(node, where)
        elif line.strip():
            raise InputError(f"{where}: neither a node nor an edge of PipeDream's graph.txt: {line.strip()[:60]!r}")
    for source, target in edges:
        for end in (source, target):
            if end not in nodes:
                raise InputError(f"{path}: the edge {source} -- {target} is dangling: there is no node {end!r}")
    if not nodes:
        raise InputError(f"{path} has no nodes: it is not a graph.txt of PipeDream")
    return _profile(path, nodes, edges, minibatch, device_name)


def _node(match: re.Match[str], where: str) -> tuple[str, Layer, int]:
    """The description, layer and output bytes of a node line."""
    activation = sum(_number(size, where) for size in match["activation"].strip("[]").split(";"))
    layer = Layer(
        name=match["id"],
        op=match["description"],
        forward_s=_number(match["forward"], where) / 1e3,
        backward_s=_number(match["backward"], where) / 1e3,
        parameter_bytes=round(_number(match["parameter"], where)),
        saved_bytes=0 if match["description"].startswith("ReLU(inplace") else round(activation),
    )
    return match["description"], layer, round(activation)


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{where}: {text.strip()!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{where}: a time or size must be finite and at least 0, not {text.strip()}")
    return value


def _profile(
    path: Path, nodes: dict[str, tuple[str, Layer, int]], edges: list[tuple[str, str]], minibatch: int, device_name: str
) -> Profile:
    sources = {source for source, _ in edges}
    kept = {
        name
        for name, (description, _, _) in nodes.items()
        if not description.startswith("Input") and not (description.startswith("__getitem__") and name not in sources)
    }
    consumers: dict[str, list[str]] = {}
    for source, target in dict.fromkeys(edges):
        if source in kept and target in kept:
            consumers.setdefault(source, []).append(target)
    kept_edges = [(source, target) for source, targets in consumers.items() for target in targets]
    # The published files list nodes in no particular order. A component of several nodes is a cycle, which `Profile`
    # reports.
    components = graph.strong_components([name for name in nodes if name in kept], kept_edges)
    order = [name for component in components for name in component]
    notes = [
        f"times in ms; a microbatch of {minibatch}, given by the user and not by the file",
        "bytes kept for backward are taken to be those of a layer's output, and none for a ReLU in place",
    ]
    if left_out := len(nodes) - len(kept):
        notes.append(f"{left_out} nodes that are inputs, or items without readers, were left out")
    return Profile(
        layers=tuple(nodes[name][1] for name in order),
        tensors=tuple(
            Tensor(name, name, tuple(consumers[name]), nodes[name][2], nodes[name][2])
            for name in order
            if name in consumers
        ),
        minibatch=minibatch,
        model_name=path.stem,
        provenance=Provenance(
            kind="imported",
            device_name=device_name,
            how=f"imported from {path.name}, the text format of PipeDream's profiler",
            pipeplan=__version__,
            notes=tuple(notes),
        ),
    )
