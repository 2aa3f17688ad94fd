"""Workloads of dnn-partitioning and Piper, compared with the profiles they are made from and with figures by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import import_workload
import pytest

from foreign_formats import samples
from foreign_formats.assumptions import Assumptions
from foreign_formats.dnn_partitioning import read_dnn_partitioning
from foreign_formats.piper import read_piper
from pipeplan.errors import InputError
from pipeplan.importers import pipedream
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

ASSUMPTIONS = Assumptions(minibatch=8, time_unit="ms")


def branchy() -> Profile:
    layers = (
        Layer("stem", 0.002, 0.004, 1000, 512),
        Layer("left", 0.001, 0.0, 200, 64),
        Layer("right", 0.003, 0.009, 0, 32),
        Layer("join", 0.0005, 0.0005, 0, 16),
        Layer("head", 0.004, 0.008, 70_000, 4096),
    )
    tensors = (
        Tensor("stem", "stem", ("left", "right", "join"), 512, 512),
        Tensor("left", "left", ("join",), 64, 64),
        Tensor("right", "right", ("join",), 32, 32),
        Tensor("join", "join", ("head",), 16, 16),
    )
    return Profile(layers, tensors, 8)


def same(found: Profile, wanted: Profile) -> None:
    """The same graph, times, weights and kept bytes."""
    theirs = {layer.name: layer for layer in wanted.layers}
    assert {layer.name for layer in found.layers} == set(theirs)
    for layer in found.layers:
        other = theirs[layer.name]
        assert (layer.forward_s, layer.backward_s) == pytest.approx((other.forward_s, other.backward_s), abs=1e-12)
        assert (layer.parameter_bytes, layer.saved_bytes) == (other.parameter_bytes, other.saved_bytes), layer.name
    edges = {(t.producer, c, t.bytes) for t in found.tensors for c in t.consumers}
    assert edges == {(t.producer, c, t.bytes) for t in wanted.tensors for c in t.consumers}


def test_a_training_graph_is_joined_into_layers(tmp_path: Path) -> None:
    path = samples.written(tmp_path / "work.json", samples.dnn_partitioning(branchy()))
    found = read_dnn_partitioning(path, ASSUMPTIONS)
    same(found, branchy())
    assert (found.minibatch, found.model_name, found.provenance.kind) == (8, "work", "imported")
    assert "times in ms" in found.provenance.notes[0]
    assert len(found.tensors) == 4, "one tensor for each output, however many read it"


def test_an_inference_graph_has_no_backward_pass(tmp_path: Path) -> None:
    path = samples.written(tmp_path / "work.json", samples.dnn_partitioning(branchy(), training=False))
    found = read_dnn_partitioning(path, ASSUMPTIONS)
    assert all(layer.backward_s == 0 for layer in found.layers)
    assert all(tensor.gradient_bytes == 0 for tensor in found.tensors)
    head = next(layer for layer in found.layers if layer.name == "head")
    assert (head.parameter_bytes, head.saved_bytes) == (0, 74_096), "of what nobody reads the output is not known"
    assert any("of head the output is not known" in note for note in found.provenance.notes)


def test_one_input_is_not_taken_for_weights(tmp_path: Path) -> None:
    layers = tuple(Layer(f"l{number}", 0.001, 0.002, 100, 512) for number in range(12))
    tensors = tuple(Tensor(one.name, one.name, (two.name,), 512, 512) for one, two in itertools.pairwise(layers))
    document = samples.dnn_partitioning(Profile(layers, tensors, 8))
    shared = {"supportedOnFpga": 1, "cpuLatency": 0.0, "fpgaLatency": 0.0, "isBackwardNode": 0}
    document["nodes"].append(shared | {"name": "in", "id": 99, "size": 64.0})
    document["edges"].append({"sourceId": 99, "destId": 0, "cost": 0.0, "size": 64.0})
    found = read_dnn_partitioning(samples.written(tmp_path / "a.json", document), ASSUMPTIONS)
    weights = {layer.name: layer.parameter_bytes for layer in found.layers}
    assert weights.pop("in") == 0
    assert set(weights.values()) == {100}


def operators() -> dict[str, Any]:
    """Two weights, two products, and a gradient node of a class of its own between the products' backward nodes."""

    def node(number: int, name: str, latency: float, size: float, backward: bool, colour: int | None) -> dict[str, Any]:
        one: dict[str, Any] = {"id": number, "name": name, "supportedOnFpga": True, "cpuLatency": latency * 10}
        one |= {"fpgaLatency": latency, "size": size, "isBackwardNode": backward}
        return one if colour is None else one | {"colorClass": colour}

    nodes = [
        node(0, "w1", 0, 4000, False, 1),
        node(1, "mul1", 2.0, 64, False, 1),
        node(2, "w2", 0, 8000, False, 2),
        node(3, "mul2", 3.0, 32, False, 2),
        node(4, "mul2_grad", 5.0, 0, True, 2),
        node(5, "cast_grad", 0.5, 0, True, 9),
        node(6, "mul1_grad", 4.0, 0, True, 1),
        node(7, "relu", 0.25, 64, False, None),
    ]
    pairs = [(0, 1, 4000), (1, 7, 64), (2, 3, 8000), (7, 3, 64), (3, 4, 32), (4, 5, 64), (5, 6, 64), (1, 6, 64)]
    edges = [{"sourceId": a, "destId": b, "cost": size / 12e6} for a, b, size in pairs]
    return {"maxSizePerFPGA": 1e10, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}


def test_operators_of_one_colour_are_one_layer(tmp_path: Path) -> None:
    path = samples.written(tmp_path / "op.json", operators())
    with pytest.raises(InputError, match="give --bandwidth"):
        read_dnn_partitioning(path, ASSUMPTIONS)
    found = read_dnn_partitioning(path, Assumptions(8, "ms", bandwidth=12e9))
    layers = {layer.name: layer for layer in found.layers}
    assert set(layers) == {"mul1", "relu", "mul2", "cast_grad"}
    assert (layers["mul1"].forward_s, layers["mul1"].backward_s) == (0.002, 0.004)
    assert (layers["mul2"].parameter_bytes, layers["mul2"].saved_bytes) == (8000, 32)
    assert layers["mul1"].op == "2 nodes"
    assert (layers["cast_grad"].forward_s, layers["cast_grad"].backward_s) == (0.0, 0.0005)
    edges = {(t.producer, c): (t.bytes, t.gradient_bytes) for t in found.tensors for c in t.consumers}
    assert edges == {
        ("mul1", "relu"): (64, 64),
        ("relu", "mul2"): (64, 64),
        ("mul1", "cast_grad"): (0, 64),
        ("cast_grad", "mul2"): (0, 64),
    }, "gradients pass where a class with backward nodes alone lies, by the mirror image of its edges"


def test_classes_that_need_each_other_are_joined(tmp_path: Path) -> None:
    document = operators()
    document["nodes"][7]["colorClass"] = 3
    document["nodes"].append(document["nodes"][7] | {"id": 8, "name": "late"})
    document["edges"] += [{"sourceId": 3, "destId": 8, "cost": 0.1}, {"sourceId": 8, "destId": 7, "cost": 0}]
    document["edges"] = [edge for edge in document["edges"] if edge["sourceId"] != 8]
    found = read_dnn_partitioning(samples.written(tmp_path / "op.json", document), Assumptions(8, "ms", bandwidth=12e9))
    assert {layer.name for layer in found.layers} == {"mul1", "mul2", "cast_grad"}
    assert any("both ways" in note for note in found.provenance.notes)


def test_piper_at_degree_one(tmp_path: Path) -> None:
    document = samples.piper(branchy())
    found = read_piper(samples.written(tmp_path / "work.json", document), ASSUMPTIONS)
    same(found, branchy())
    assert "tensor-parallel degree 1; degrees 2 are not read" in found.provenance.notes
    for node in document["nodes"]:
        del node["TMPCs"]["1"][1]
    alone = read_piper(samples.written(tmp_path / "alone.json", document), ASSUMPTIONS)
    stem = next(layer for layer in alone.layers if layer.name == "stem")
    assert (stem.forward_s, stem.backward_s) == pytest.approx((0.002, 0.004)), "a third of 6 ms"
    assert any("forward is a third of the time of" in note for note in alone.provenance.notes)


def test_nodes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    document = samples.piper(branchy())
    for node in document["nodes"][1:3]:
        node["name"] = "block"
    found = read_piper(samples.written(tmp_path / "work.json", document), ASSUMPTIONS)
    assert {layer.name: layer.op for layer in found.layers if "block" in layer.name} == {
        "block#1": "block",
        "block#2": "block",
    }


def test_what_carries_nothing_is_left_out(tmp_path: Path) -> None:
    document = samples.piper(branchy())
    blank = {"id": "vanilla", "timePerSample": 0.0, "parameterSize": 0.0, "memoryUsageA": 0.0, "memoryUsageB": 0.0}
    document["nodes"] += [{"id": number, "name": f"in{number}", "TMPCs": {"1": [blank]}} for number in (7, 8, 9)]
    document["edges"] += [
        {"sourceId": 7, "destId": 8, "communicationCost": 0.0},
        {"sourceId": 8, "destId": 0, "communicationCost": 0.0},
        {"sourceId": 4, "destId": 9, "communicationCost": 64.0},
    ]
    found = read_piper(samples.written(tmp_path / "work.json", document), ASSUMPTIONS)
    same(found, branchy())
    assert "3 nodes without work, weights or readers were left out" in found.provenance.notes


@pytest.mark.parametrize("name", ["resnet50", "gnmt16"])
def test_published_profiles_come_out_the_same_by_all_three_formats(reference: Path, tmp_path: Path, name: str) -> None:
    """The published workloads of both are PipeDream's profiles, of the very same models."""
    original = pipedream.read_pipedream_profile(reference / "pipedream" / f"{name}.txt", 8)
    path = samples.written(tmp_path / "one.json", samples.dnn_partitioning(original))
    by_output = {t.producer: t.bytes for t in original.tensors}
    ours = {layer.name: layer for layer in read_dnn_partitioning(path, ASSUMPTIONS).layers}
    second = samples.written(path, samples.piper(original))
    theirs = {layer.name: layer for layer in read_piper(second, ASSUMPTIONS).layers}
    assert len(ours) == len(theirs) > 60
    for layer in original.layers:
        for found in (ours.get(layer.name), theirs.get(layer.name)):
            if found is None:
                assert not layer.forward_s + layer.backward_s + by_output.get(layer.name, 0)
                continue
            assert found.forward_s == pytest.approx(layer.forward_s, abs=1e-9)
            assert found.backward_s == pytest.approx(layer.backward_s, abs=1e-9)
            assert found.parameter_bytes == layer.parameter_bytes


def excerpts() -> tuple[dict[str, Any], dict[str, Any]]:
    """The embedding and the first LSTM of GNMT-16 as published: throughput-inputs/LayerGraphs/gnmt_training.json of
    dnn-partitioning, without fields that are not read, and inputs/gnmt.json of Piper.
    """
    nodes, named = [], (("node4", 0.14, 25.538, 145489920.0), ("node5", 14.126, 0.019, 93388800.0))
    for colour, (name, forward, backward, size) in enumerate(named):
        one = {"supportedOnFpga": 1, "colorClass": colour, "size": size}
        nodes.append(one | {"name": name, "id": colour, "fpgaLatency": forward, "isBackwardNode": 0})
        nodes.append(one | {"name": f"{name}grad", "id": colour + 97, "fpgaLatency": backward, "isBackwardNode": True})
    nodes.append({"name": "node6", "id": 6, "supportedOnFpga": 1, "fpgaLatency": 0.1, "isBackwardNode": 0, "size": 0.0})
    edges = [{"sourceId": 0, "destId": 1, "cost": 0.006103515625, "size": 13107200.0}]
    edges += [{"sourceId": 1, "destId": 6, "cost": 0.01220703125, "size": 26214400.0}]
    ways = []
    for number, (name, total, again, weights, kept) in enumerate(
        [
            ("node4", 25.678, 25.818, 132382720.0, 13107200.0),
            ("node5", 14.145, 28.270999999999997, 67174400.0, 26214400.0),
        ]
    ):
        one = {"parameterSize": weights, "memoryUsageA": kept, "memoryUsageB": 2 * weights}
        vanilla = one | {"id": "vanilla", "timePerSample": total}
        tmpcs = {"1": [vanilla, one | {"id": "activation recomp", "timePerSample": again, "memoryUsageA": 0.0}]}
        ways.append({"id": number, "name": name, "TMPCs": tmpcs})
    joined = [{"sourceId": 0, "destId": 1, "communicationCost": 13107200.0}]
    return {"maxFPGAs": 6, "nodes": nodes, "edges": edges}, {"mbsInBatch": 256, "nodes": ways, "edges": joined}


def test_what_both_published_agrees_with_what_they_made_it_from(reference: Path, tmp_path: Path) -> None:
    original = pipedream.read_pipedream_profile(reference / "pipedream" / "gnmt16.txt", 8)
    first, second = excerpts()
    ours = read_dnn_partitioning(samples.written(tmp_path / "a.json", first), ASSUMPTIONS)
    theirs = read_piper(samples.written(tmp_path / "b.json", second), ASSUMPTIONS)
    for found in (ours, theirs):
        for layer in found.layers:
            if layer.name in ("node4", "node5"):
                other = next(one for one in original.layers if one.name == layer.name)
                assert (layer.forward_s, layer.backward_s) == pytest.approx((other.forward_s, other.backward_s))
                assert (layer.parameter_bytes, layer.saved_bytes) == (other.parameter_bytes, other.saved_bytes)


@pytest.mark.parametrize(
    ("make", "path", "value", "complaint"),
    [
        (samples.dnn_partitioning, ("nodes", 0, "id"), 1, "there are two nodes 1"),
        (samples.dnn_partitioning, ("nodes", 0, "fpgaLatency"), -1.0, r"nodes\[0\]: fpgaLatency: expected at least 0"),
        (samples.dnn_partitioning, ("nodes", 0, "supportedOnFpga"), 0, "cannot run on the accelerator"),
        (samples.dnn_partitioning, ("nodes", 0, "isBackwardNode"), "no", "isBackwardNode: expected a number"),
        (samples.dnn_partitioning, ("edges", 0, "destId"), 99, "dangling edge: there is no node 99"),
        (samples.dnn_partitioning, ("edges", 0, "sourceId"), 6, "leads from a backward to a forward node"),
        (samples.dnn_partitioning, ("nodes",), [], "there are no forward nodes"),
        (samples.piper, ("nodes", 0, "id"), 1, "two nodes have the same id"),
        (samples.piper, ("nodes", 0, "TMPCs"), {"2": []}, "no values for tensor-parallel degree 1"),
        (samples.piper, ("edges", 0, "communicationCost"), "x", "communicationCost: expected a number"),
        (samples.piper, ("edges", 0, "sourceId"), 4, "form a cycle"),
        (samples.piper, ("nodes",), [], "no layers|dangling"),
    ],
    ids=range(12),
)
def test_a_malformed_workload_is_one_line(
    tmp_path: Path, make: Any, path: tuple[Any, ...], value: Any, complaint: str
) -> None:
    document = make(branchy())
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    load = read_dnn_partitioning if make is samples.dnn_partitioning else read_piper
    with pytest.raises(InputError, match=complaint):
        load(samples.written(tmp_path / "work.json", document), ASSUMPTIONS)


@pytest.mark.parametrize("make", [samples.dnn_partitioning, samples.piper])
def test_the_command_recognises_both_formats(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, output = samples.written(tmp_path / "work.json", make(branchy())), tmp_path / "profile.json"
    arguments = ["import_workload.py", str(path), "--minibatch", "8", "--time-unit", "ms", "-o", str(output)]
    monkeypatch.setattr("sys.argv", arguments)
    import_workload.main()
    same(Profile.load(output), branchy())
