"""`pipeplan profile diff`: the same layers are found, and the differences are those that were put in."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run

from pipeplan.importers import pipedream
from pipeplan.profile_data.diff import MODULE, NAME, ORDER, WEIGHTS, compare_profiles, match_layers
from pipeplan.profile_data.layers import Layer, Size, Tensor
from pipeplan.profile_data.profile import Profile


def chain(*layers: Layer, minibatch: int = 8, **rest: Any) -> Profile:
    tensors = tuple(Tensor(one.name, one.name, (two.name,), 800, 800) for one, two in itertools.pairwise(layers))
    return Profile(layers, tensors, minibatch, model_name="net", **rest)


def layer(name: str, op: str = "Linear", forward_s: float = 0.001, weights: int = 4000, **rest: Any) -> Layer:
    return Layer(name, forward_s, 2 * forward_s, weights, 1600, op=op, **rest)


def pairs(first: Profile, second: Profile) -> list[tuple[str, str, str]]:
    return [("+".join(names), "+".join(others), by) for names, others, by in match_layers(first, second) if by]


def test_layers_are_matched_by_name_then_by_order_and_kind() -> None:
    first = chain(layer("a"), layer("b", "ReLU", weights=0), layer("c", weights=8000), layer("d", "loss", weights=0))
    second = chain(
        layer("a"),
        layer("x", "ReLU(inplace=True)", weights=0),
        layer("extra", "Dropout(p=0.5)", weights=0),
        layer("y", "Linear(in_features=10)", weights=8000),
        layer("d", "loss", weights=0),
    )
    assert pairs(first, second) == [("a", "a", NAME), ("b", "x", ORDER), ("c", "y", ORDER), ("d", "d", NAME)]
    assert [names for _, names, by in match_layers(first, second) if not by] == [("extra",)]


def test_the_same_weights_by_another_kind_are_matched_last() -> None:
    first = chain(layer("a", "LSTM", weights=9000), layer("b", "Linear"), layer("c", "Linear", weights=700))
    second = chain(layer("x", "EmuBidirLSTM", weights=9000), layer("y", "Linear"), layer("z", "ReLU", weights=0))
    assert pairs(first, second) == [("a", "x", WEIGHTS), ("b", "y", ORDER)]


def test_a_name_that_means_something_else_matches_nothing() -> None:
    first = chain(layer("node1", "Conv2d"), layer("node2", "ReLU", weights=0))
    second = chain(layer("node1", "ReLU", weights=0), layer("node2", "Conv2d"))
    assert pairs(first, second) == [("node1", "node2", ORDER)]
    renamed = chain(layer("node1", "conv2d_bias"), layer("node2", "ReLU", weights=0))
    assert pairs(first, renamed)[0] == ("node1", "node1", NAME), "the same name and the same weights are enough"


def test_a_module_is_matched_with_its_parts() -> None:
    whole = chain(layer("stem"), layer("block", "Block", weights=12000), layer("head"))
    parts = chain(layer("stem"), layer("block.fc1"), layer("block.act", "GELU", weights=0), layer("head"))
    assert pairs(whole, parts)[1] == ("block", "block.fc1+block.act", MODULE)
    assert pairs(parts, whole)[1] == ("block.fc1+block.act", "block", MODULE)
    found = compare_profiles(whole, parts)
    assert not found.same_structure
    row = next(row for row in found.matched if row.by == MODULE)
    assert (row.first.total_s, row.second.total_s) == pytest.approx((0.003, 0.006))
    assert (row.first.parameter_bytes, row.second.parameter_bytes) == (12000, 4000)


def test_other_names_for_a_published_model_are_all_found(reference: Path) -> None:
    first = pipedream.read_pipedream_profile(reference / "pipedream" / "resnet50.txt", 64)
    new = {layer.name: f"other.{number}" for number, layer in enumerate(first.layers)}
    layers = tuple(replace(one, name=new[one.name], forward_s=one.forward_s * 1.5) for one in first.layers)
    tensors = tuple(
        replace(one, producer=new[one.producer], consumers=tuple(new[name] for name in one.consumers))
        for one in first.tensors
    )
    found = compare_profiles(first, replace(first, layers=layers, tensors=tensors))
    assert len(found.matched) == len(first.layers)
    assert found.same_structure
    assert all(row.second_names == (new[row.first_names[0]],) for row in found.matched)
    forward = sum(one.forward_s for one in first.layers)
    assert sum(row.change_s for row in found.matched) == pytest.approx(0.5 * forward)


def test_what_moves_the_total_most_comes_first_and_noise_is_told_apart() -> None:
    spread = {"forward_spread_s": 1e-4, "backward_spread_s": 1e-4}
    first = chain(layer("a", **spread), layer("b", **spread), layer("c", **spread), graph_hash="sha256:1")
    second = chain(
        layer("a", forward_s=0.00101, **spread),
        layer("b", forward_s=0.003, **spread),
        layer("c", forward_s=0.0005, **spread),
        graph_hash="sha256:1",
    )
    found = compare_profiles(first, second)
    assert [row.first_names[0] for row in found.matched] == ["b", "c", "a"]
    assert [row.change_s for row in found.matched] == pytest.approx([0.006, -0.0015, 0.00003])
    assert [row.beyond_spread for row in found.matched] == [True, True, False]
    assert (found.graph, found.same_structure, found.per_sample) == ("same", True, False)
    assert compare_profiles(first, replace(second, graph_hash="sha256:2")).graph == "different"
    assert compare_profiles(first, replace(second, graph_hash="")).graph == "not known"
    quiet = compare_profiles(chain(layer("a")), second)
    assert quiet.matched[0].beyond_spread is None


def test_other_minibatches_are_compared_per_sample_or_at_a_size_that_both_have() -> None:
    small = chain(layer("a"), layer("b"))
    large = chain(layer("a", forward_s=0.003), layer("b", forward_s=0.003), minibatch=16)
    found = compare_profiles(small, large)
    assert found.per_sample
    assert found.totals[0].total_s == pytest.approx(0.006 / 8)
    assert found.totals[1].total_s == pytest.approx(0.018 / 16)
    assert (found.totals[0].parameter_bytes, found.totals[0].saved_bytes) == (8000, 400)
    both = replace(large, sizes=(Size(8, (layer("a", forward_s=0.002), layer("b")), large.tensors),))
    found = compare_profiles(small, both)
    assert (found.per_sample, found.second.minibatch) == (False, 8)
    assert [row.change_s for row in found.matched] == pytest.approx([0.003, 0.0])


def test_the_command(run: Run) -> None:
    first = chain(*(layer(f"l{number}") for number in range(5)), layer("old", "Dropout", weights=0))
    second = chain(*(layer(f"l{number}", forward_s=0.001 * (number + 1)) for number in range(5)), minibatch=16)
    first.save(Path("a.json"))
    second.save(Path("b.json"))
    done = run("profile", "diff", "a.json", "b.json", "--top", "3")
    assert (done.code, done.err) == (0, "")
    text = " ".join(done.out.split())
    for said in (
        "A: a.json: net, microbatch 8",
        "Graphs: not both traced, not the same layers and edges",
        "Layers matched: 5 by name; only in A: 1, with 375 µs, such as old",
        "Microbatches of 8 and 16 samples: times, kept and outputs are compared per sample",
        "l4 375.000 937.500 2.50 2.50 2.50 +25.0% = 0.50 gone",
        "old (A only) 375.000 0.000 gone gone gone -16.7% = gone =",
        "3 others",
        "total 2250.000 2812.500 1.25 1.25 1.25 +25.0% = 0.42 0.40",
        "No spreads to compare with",
    ):
        assert said in text, said
    found = json.loads(run("profile", "diff", "a.json", "b.json", "--json").out)
    assert found["per_sample"] is True
    assert [one["name"] for one in found["only_first"]] == ["old"]
    assert found["layers"][0]["first_names"] == ["l4"]
    assert found["first"]["digest"] == first.digest()
    same = run("profile", "diff", "a.json", "a.json")
    assert same.code == 0
    assert "the same edges between them" in same.out
    wrong = run("profile", "diff", "a.json", "nowhere.json")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
