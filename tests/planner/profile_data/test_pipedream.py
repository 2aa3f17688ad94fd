"""Profiles of PipeDream, and two profiles compared."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, refused
from manifests import PIPEDREAM

from pipeplan.errors import InputError
from pipeplan.profile_data import pipedream
from pipeplan.profile_data.diff import compare_profiles
from pipeplan.profile_data.layers import Layer, Size, Tensor
from pipeplan.profile_data.profile import Profile

WRONG = (
    ("forward_compute_time=2.000", "forward_compute_time=-2.000", "line 1: a time or size must be finite"),
    ("forward_compute_time=2.000", "forward_compute_time=nan", "line 1: a time or size must be finite"),
    ("forward_compute_time=2.000", "forward_compute_time=2..0", "line 1: '2..0' is not a number"),
    ("[60.0; 40.0]", "[60.0; many]", "line 3: 'many' is not a number"),
    ("\tnode2 -- node3", "\tnode2 -- node9", "dangling"),
    ("\tnode3 -- node4", "\tnode3 -- node2", "cycle"),
    ("node3 -- ReLU", "node2 -- ReLU", "line 3: node 'node2' appears twice"),
    ("node2 -- Conv2d(3, 8) -- forward", "node2 forward", "line 1: neither a node nor an edge"),
    (PIPEDREAM, "\n", "has no nodes"),
)
"""What a file says, what it should say instead, and the complaint."""


def test_units_lists_and_nodes_without_work_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(PIPEDREAM)
    profile = pipedream.read_pipedream_profile(path, 16)
    assert [layer.name for layer in profile.layers] == ["node2", "node3"]
    conv, relu = profile.layers
    assert (conv.forward_s, conv.backward_s, conv.parameter_bytes, conv.saved_bytes) == (0.002, 0.004, 64, 100)
    assert relu.saved_bytes == 0, "a ReLU in place shares the memory of what it reads"
    assert [(one.producer, one.consumers, one.bytes) for one in profile.tensors] == [("node2", ("node3",), 100)]
    assert profile.minibatch == 16
    for old, new, complaint in WRONG:
        path.write_text(PIPEDREAM.replace(old, new, 1))
        with pytest.raises(InputError, match=complaint):
            pipedream.read_pipedream_profile(path, 16)


PUBLISHED = {
    "vgg16": (128, 0.6725, 553.4),
    "alexnet": (256, 0.0853, 244.4),
    "resnet50": (128, 0.4434, 102.2),
    "gnmt8": (64, 0.0894, 775.1),
    "gnmt16": (64, 0.5205, 1110.9),
}
"""Samples in a minibatch, seconds of both passes, and MB of parameters."""


def test_the_published_totals(reference: Path) -> None:
    for name, (minibatch, total_s, parameters_mb) in PUBLISHED.items():
        profile = pipedream.read_pipedream_profile(reference / "pipedream" / f"{name}.txt", minibatch)
        assert profile.total_s == pytest.approx(total_s, abs=5e-5)
        assert sum(layer.parameter_bytes for layer in profile.layers) / 1e6 == pytest.approx(parameters_mb, abs=0.05)


def test_the_command_asks_for_the_minibatch(run: Run) -> None:
    Path("graph.txt").write_text(PIPEDREAM)
    assert "give --microbatch" in refused(run, "import", "graph.txt")
    done = run("import", "graph.txt", "--microbatch", "8", "--device-name", "V100")
    assert done.code == 0, done.err
    assert "2 layers, 8.5 ms forward and backward" in done.out
    provenance = Profile.load(Path("profile.json")).provenance
    assert (provenance.kind, provenance.device_name) == ("imported", "V100")
    assert "exists" in refused(run, "import", "graph.txt", "--microbatch", "8")
    line = refused(run, "import", "profile.json", "--microbatch", "8", "-o", "b.json")
    assert "neither a node nor an edge" in line


def chain(*layers: Layer, minibatch: int = 8, **rest: Any) -> Profile:
    tensors = tuple(Tensor(one.name, one.name, (two.name,), 800, 800) for one, two in itertools.pairwise(layers))
    return Profile(layers, tensors, minibatch, model_name="net", **rest)


def layer(name: str, op: str = "Linear", forward_s: float = 0.001, weights: int = 4000, **rest: Any) -> Layer:
    return Layer(name, forward_s, 2 * forward_s, weights, 1600, op=op, **rest)


def test_what_moves_the_total_most_comes_first_and_noise_is_told_apart() -> None:
    def measured(hash_: str, **forward: float) -> Profile:
        spread = {"forward_spread_s": 1e-4, "backward_spread_s": 1e-4}
        return chain(*(layer(name, forward_s=taken, **spread) for name, taken in forward.items()), graph_hash=hash_)

    first = measured("sha256:1", a=0.001, b=0.001, c=0.001)
    second = measured("sha256:1", a=0.00101, b=0.003, c=0.0005)
    found = compare_profiles(first, second)
    assert [row.name for row in found.layers] == ["b", "c", "a"]
    assert [row.change_s for row in found.layers] == pytest.approx([0.006, -0.0015, 0.00003])
    assert [row.beyond_spread for row in found.layers] == [True, True, False]
    assert (found.graph, found.same_structure, found.per_sample) == ("same", True, False)
    assert compare_profiles(first, replace(second, graph_hash="sha256:2")).graph == "different"
    assert compare_profiles(first, replace(second, graph_hash="")).graph == "not known"
    assert compare_profiles(chain(layer("a")), second).layers[0].beyond_spread is None


def test_other_minibatches_are_compared_per_sample_or_at_a_size_that_both_have() -> None:
    small = chain(layer("a"), layer("b"))
    large = chain(layer("a", forward_s=0.003), layer("b", forward_s=0.003), minibatch=16)
    found = compare_profiles(small, large)
    assert found.per_sample
    assert [total.total_s for total in found.totals] == pytest.approx([0.006 / 8, 0.018 / 16])
    assert (found.totals[0].parameter_bytes, found.totals[0].saved_bytes) == (8000, 400)
    both = replace(large, sizes=(Size(8, (layer("a", forward_s=0.002), layer("b")), large.tensors),))
    found = compare_profiles(small, both)
    assert (found.per_sample, found.second.minibatch) == (False, 8)
    assert [row.change_s for row in found.layers] == pytest.approx([0.003, 0.0])


def test_the_command_compares(run: Run) -> None:
    first = chain(*(layer(f"l{number}") for number in range(5)), layer("old", "Dropout", weights=0))
    second = chain(*(layer(f"l{number}", forward_s=0.001 * (number + 1)) for number in range(5)), minibatch=16)
    first.save(Path("a.json"))
    second.save(Path("b.json"))
    done = run("profile", "diff", "a.json", "b.json", "--top", "3")
    assert (done.code, done.err) == (0, "")
    text = " ".join(done.out.split())
    for said in (
        "Graphs: not both traced, not the same layers and edges",
        "Layers in both: 5; only in A: 1, with 375 µs, such as old",
        "l4 375.000 937.500 2.50 2.50 2.50 +25.0% = 0.50 gone",
        "old (A only) 375.000 0.000 gone gone gone -16.7% = gone =",
        "total 2250.000 2812.500 1.25 1.25 1.25 +25.0% = 0.42 0.40",
    ):
        assert said in text, said
    found = json.loads(run("profile", "diff", "a.json", "b.json", "--json").out)
    assert (found["per_sample"], found["layers"][0]["name"]) == (True, "l4")
    assert [one["name"] for one in found["only_first"]] == ["old"]
    assert found["first"]["digest"] == first.digest()
    assert "the same edges between them" in run("profile", "diff", "a.json", "a.json").out
    refused(run, "profile", "diff", "a.json", "nowhere.json")
