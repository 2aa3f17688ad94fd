"""The JSON of Piper (Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization",
NeurIPS 2021; github.com/msr-fiddle/piper, README.md "Input format", algo.cpp `from_json`).

`nodes` have `id`, perhaps `name`, and `TMPCs`: for each degree of tensor parallelism a list of ways to run the node,
each with `timePerSample` (forward and backward together), `parameterSize`, `memoryUsageA` (bytes for every microbatch
in flight) and `memoryUsageB` (bytes beside that). `edges` have `sourceId`, `destId` and `communicationCost` in bytes.

All published files have two ways at degree 1, `vanilla` and `activation recomp`. The second runs forward once more, so
that the difference of their times is the forward pass: for the nodes that come from PipeDream's profiles it is, to the
digit. The unit of time differs between the published files: seconds in bert32a100.json, milliseconds in the others.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from foreign_formats.assumptions import Assumptions
from foreign_formats.graph_parts import ordered, unique_names, whole_bytes, without_idle
from pipeplan.importers.recognise import imported_provenance
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node, read_json

KIND = "Piper file"
TOOL = "the input format of Piper (NeurIPS 2021)"
FORWARD_SHARE = 1 / 3
"""Share of a node's time where the file does not tell: backward computes two products of the forward one's size."""


def read_piper(path: Path, assumptions: Assumptions) -> Profile:
    """Read a workload at tensor-parallel degree 1. Raises `InputError` where the file is malformed."""
    root = read_json(path, KIND)
    nodes = root["nodes"].items()
    named = [(node["id"].integer(), _name(node)) for node in nodes]
    names = unique_names(named)
    if len(names) < len(nodes):
        root["nodes"].fail("two nodes have the same id")
    guessed: list[str] = []
    degrees: set[str] = set()
    layers = []
    for node, (number, name) in zip(nodes, named, strict=True):
        degrees |= set(node["TMPCs"].mapping())
        layers.append(_layer(node, names[number], name, assumptions.units_per_second, guessed))
    layers, tensors, gone = without_idle(layers, _tensors(root, names))
    notes = [assumptions.note, *_notes(guessed, degrees, gone)]
    return Profile(
        layers=ordered(layers, tensors),
        tensors=tuple(tensors),
        minibatch=assumptions.minibatch,
        model_name=path.stem,
        provenance=imported_provenance(path, TOOL, "", notes),
    )


def _notes(guessed: list[str], degrees: set[str], gone: list[str]) -> list[str]:
    notes = ["forward is what recomputation adds to a node's time, backward the rest"]
    if guessed:
        notes.append(f"forward is a third of the time of {len(guessed)} nodes without recomputation: {guessed[0]} …")
    if len(degrees) > 1:
        others = ", ".join(sorted(degrees - {"1"}))
        notes.append(f"tensor-parallel degree 1; degrees {others} are not read")
    notes.append("kept for backward is memoryUsageA; memoryUsageB is not read")
    notes.append("edges of one node with the same bytes are one tensor")
    if gone:
        notes.append(f"{len(gone)} nodes without work, weights or readers were left out")
    return notes


def _name(node: Node) -> str:
    name = node.get("name")
    return name.text() if name else f"node{node['id'].integer()}"


def _layer(node: Node, name: str, op: str, units: float, guessed: list[str]) -> Layer:
    ways = node["TMPCs"].get("1")
    if ways is None or not ways.items():
        node["TMPCs"].fail(f"node {name} has no values for tensor-parallel degree 1, on one device")
    by_name = {one["id"].text(): one for one in ways.items()}
    plain = next((one for key, one in by_name.items() if "recomp" not in key), ways.items()[0])
    again = next((one for key, one in by_name.items() if "recomp" in key), None)
    total = plain["timePerSample"].number()
    forward = again["timePerSample"].number() - total if again is not None and again is not plain else -1.0
    if not 0 <= forward <= total:
        forward = total * FORWARD_SHARE
        guessed += [name] if total else []
    parameters, kept = plain["parameterSize"], plain["memoryUsageA"]
    return Layer(
        name=name,
        op=op if op != name else "",
        forward_s=forward / units,
        backward_s=(total - forward) / units,
        parameter_bytes=whole_bytes(parameters.number(), parameters.where),
        saved_bytes=whole_bytes(kept.number(), kept.where),
    )


def _tensors(root: Node, names: dict[int, str]) -> list[Tensor]:
    """Edges of one source with the same bytes become one tensor, which crosses a cut once."""
    consumers: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for edge in root["edges"].items():
        source, target = edge["sourceId"].integer(), edge["destId"].integer()
        for end in (source, target):
            if end not in names:
                edge.fail(f"a dangling edge: there is no node {end}")
        cost = edge["communicationCost"]
        consumers[source, whole_bytes(cost.number(), cost.where)][names[target]] = None
    counts: dict[int, int] = defaultdict(int)
    found = []
    taken = set(names.values())
    for (source, size), targets in consumers.items():
        counts[source] += 1
        name = names[source] if counts[source] == 1 else f"{names[source]}:{counts[source]}"
        while counts[source] > 1 and name in taken:
            name += "'"
        taken.add(name)
        found.append(Tensor(name, names[source], tuple(targets), size, size))
    return found
