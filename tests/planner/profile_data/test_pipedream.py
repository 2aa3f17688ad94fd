from pathlib import Path

import pytest
from commandline import Run
from manifests import PIPEDREAM

from pipeplan.errors import InputError
from pipeplan.profile_data import pipedream
from pipeplan.profile_data.profile import Profile


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "graph.txt"
    path.write_text(text)
    return path


def test_units_lists_and_nodes_without_work(tmp_path: Path) -> None:
    profile = pipedream.read_pipedream_profile(_written(tmp_path, PIPEDREAM), 16)
    assert [layer.name for layer in profile.layers] == ["node2", "node3"]
    conv, relu = profile.layers
    assert (conv.forward_s, conv.backward_s, conv.parameter_bytes, conv.saved_bytes) == (0.002, 0.004, 64, 100)
    assert relu.saved_bytes == 0, "a ReLU in place shares the memory of what it reads"
    assert [(tensor.producer, tensor.consumers, tensor.bytes) for tensor in profile.tensors] == [
        ("node2", ("node3",), 100)
    ]
    assert profile.minibatch == 16


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


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    for old, new, complaint in WRONG:
        with pytest.raises(InputError, match=complaint):
            pipedream.read_pipedream_profile(_written(tmp_path, PIPEDREAM.replace(old, new, 1)), 16)


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
    refused = run("import", "graph.txt")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "give --microbatch" in refused.err
    assert not Path("profile.json").exists()
    done = run("import", "graph.txt", "--microbatch", "8", "--device-name", "V100")
    assert done.code == 0, done.err
    assert "2 layers, 8.5 ms forward and backward" in done.out
    provenance = Profile.load(Path("profile.json")).provenance
    assert (provenance.kind, provenance.device_name) == ("imported", "V100")
    assert "exists" in run("import", "graph.txt", "--microbatch", "8").err
    assert "neither a node nor an edge" in run("import", "profile.json", "--microbatch", "8", "-o", "b.json").err
    assert not Path("b.json").exists()
