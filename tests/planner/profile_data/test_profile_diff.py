"""`pipeplan profile diff`: the same layers are found, and the differences are those that were put in."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run

from pipeplan.profile_data.diff import compare_profiles
from pipeplan.profile_data.layers import Layer, Size, Tensor
from pipeplan.profile_data.profile import Profile


def chain(*layers: Layer, minibatch: int = 8, **rest: Any) -> Profile:
    tensors = tuple(Tensor(one.name, one.name, (two.name,), 800, 800) for one, two in itertools.pairwise(layers))
    return Profile(layers, tensors, minibatch, model_name="net", **rest)


def layer(name: str, op: str = "Linear", forward_s: float = 0.001, weights: int = 4000, **rest: Any) -> Layer:
    return Layer(name, forward_s, 2 * forward_s, weights, 1600, op=op, **rest)


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
    assert [row.name for row in found.layers] == ["b", "c", "a"]
    assert [row.change_s for row in found.layers] == pytest.approx([0.006, -0.0015, 0.00003])
    assert [row.beyond_spread for row in found.layers] == [True, True, False]
    assert (found.graph, found.same_structure, found.per_sample) == ("same", True, False)
    assert compare_profiles(first, replace(second, graph_hash="sha256:2")).graph == "different"
    assert compare_profiles(first, replace(second, graph_hash="")).graph == "not known"
    quiet = compare_profiles(chain(layer("a")), second)
    assert quiet.layers[0].beyond_spread is None


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
    assert [row.change_s for row in found.layers] == pytest.approx([0.003, 0.0])


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
        "Layers in both: 5; only in A: 1, with 375 µs, such as old",
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
    assert found["layers"][0]["name"] == "l4"
    assert found["first"]["digest"] == first.digest()
    same = run("profile", "diff", "a.json", "a.json")
    assert same.code == 0
    assert "the same edges between them" in same.out
    wrong = run("profile", "diff", "a.json", "nowhere.json")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
