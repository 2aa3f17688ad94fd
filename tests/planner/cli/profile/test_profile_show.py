"""`pipeplan profile show`: all that a profile says is there, and pictures are of its graph."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run, refused

from pipeplan.drawing.fold_chains import fold_chains, most_expensive_layers
from pipeplan.drawing.terminal import MAX_DRAWN_LANES, dag_lines, graph_lanes
from pipeplan.profile_data import pipedream
from pipeplan.profile_data.layers import Layer, Provenance, Size, Tensor
from pipeplan.profile_data.profile import Profile


def profile_of(arrows: str, times: dict[str, float] | None = None) -> Profile:
    """A profile of layers of one letter, from edges such as `ab bc`."""
    names = sorted(set(arrows) - {" "})
    layers = tuple(Layer(name, (times or {}).get(name, 0.001), 0.0, 0, 0) for name in names)
    targets: dict[str, list[str]] = {}
    for source, target in arrows.split():
        targets.setdefault(source, []).append(target)
    tensors = tuple(Tensor(name, name, tuple(found), 8, 8) for name, found in targets.items())
    return Profile(layers, tensors, 4, model_name="letters")


def lines(profile: Profile, width: int = 80) -> list[str]:
    return [text.plain for text in dag_lines(profile, width)]


def read_back(drawn: list[str]) -> list[list[int]]:
    """What every node reads, by following the strokes of the picture upwards."""
    found = []
    columns: dict[int, int] = {}
    for number, line in enumerate(drawn):
        place = left = right = line.index("○")
        while left >= 2 and line[left - 1] == "─":
            left -= 2
        while line[right + 1 : right + 2] == "─":
            right += 2
        joined = {at for at in range(left, right + 1, 2) if line[at] in "├┤╰╯┴┼"}
        joined |= {place} & set(columns)
        found.append(sorted(columns[at] for at in joined))
        columns = {at: source for at, source in columns.items() if line[at : at + 1] in ("│", "├", "┤", "┼")}
        columns[place] = number
    return found


def test_every_edge_is_a_stroke_between_two_nodes() -> None:
    # What reads nothing does not stand below another one.
    for reads, drawn in (
        ([[], [0], [0], [0, 1, 2]], ["○", "├─○", "├─│─○", "○─┴─╯"]),
        # The second lane is read on the way to the third, and again by the last.
        ([[], [], [], [0, 1, 2], [1, 3]], ["○", "│ ○", "│ │ ○", "○─┼─╯", "○─╯"]),
        ([[], []], ["○", "  ○"]),
    ):
        assert graph_lanes(reads, [False] * len(reads)) == drawn
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(2, 14)
        reads = [sorted(rng.sample(range(node), min(node, rng.choice([0, 1, 1, 1, 2, 3])))) for node in range(count)]
        assert read_back(graph_lanes(reads, [False] * count)) == reads, reads
    drawn = graph_lanes([[] for _ in range(40)] + [list(range(40))], [False] * 40 + [True])
    assert max(map(len, drawn)) <= 2 * MAX_DRAWN_LANES + 1, "very many lanes stay within their room"
    assert drawn[-1].startswith("●─┴")


def test_chains_are_drawn_together_but_for_what_is_expensive() -> None:
    plain = profile_of("ab bc cd de ae ef")
    assert ["".join(layer.name for layer in chain.layers) for chain in fold_chains(plain)] == ["a", "bcd", "ef"]
    assert [chain.reads for chain in fold_chains(plain)] == [(), (0,), (0, 1)]
    hot = profile_of("ab bc cd de ae ef", {"c": 1.0})
    assert most_expensive_layers(hot) == ["c"]
    shown = [re.sub(r"[^a-z…]+", " ", line.replace("layers", "")).split() for line in lines(hot)]
    assert shown == [["a"], ["b"], ["c"], ["d"], ["e", "…", "f"]]
    assert ["●" in line for line in lines(hot)] == [False, False, True, False, False]
    assert lines(hot)[2].rstrip().endswith("█" * 10)
    # What takes as long as the last is marked too; of many that take as long as each other none stands out.
    assert most_expensive_layers(profile_of("ab bc cd", {"a": 4.0, "b": 3.0, "c": 3.0, "d": 0.1})) == ["a", "b", "c"]
    assert most_expensive_layers(profile_of("ab", {"a": 0.0, "b": 0.0})) == []
    assert most_expensive_layers(transformer(9)) == ["head"]


def test_published_models_are_readable_at_80_columns(reference: Path) -> None:
    for name, most in (("resnet50", 90), ("gnmt8", 40), ("gnmt16", 80), ("vgg16", 15)):
        drawn = lines(pipedream.read_pipedream_profile(reference / "pipedream" / f"{name}.txt", 64))
        assert len(drawn) <= most
        assert max(map(len, drawn)) <= 80
        assert max(line.index("node") for line in drawn) <= 20, "lanes leave room for names"


def transformer(blocks: int, *, cross: bool = False) -> Profile:
    """Blocks with two residual connections; with `cross`, each reads what comes first, as a decoder its encoder."""
    layers, reads = [Layer("embed", 0.001, 0.0, 8, 0, op="Embedding")], {}
    last = "embed"
    for number in range(blocks):
        for name, op, inputs in (
            ("ln_1", "LayerNorm", [last]),
            ("attn", "Attention", [f"h.{number}.ln_1", *(["embed"] if cross else [])]),
            ("add_1", "add", [f"h.{number}.attn", last]),
            ("mlp", "Linear", [f"h.{number}.add_1"]),
            ("add_2", "add", [f"h.{number}.mlp", f"h.{number}.add_1"]),
        ):
            layers.append(Layer(f"h.{number}.{name}", 0.001, 0.0, 4, 0, op=op))
            reads[f"h.{number}.{name}"] = inputs
        last = f"h.{number}.add_2"
    layers.append(Layer("head", 0.05, 0.0, 99, 0, op="Linear"))
    reads["head"] = [last]
    readers: dict[str, list[str]] = {}
    for name, inputs in reads.items():
        for source in inputs:
            readers.setdefault(source, []).append(name)
    tensors = tuple(Tensor(name, name, tuple(dict.fromkeys(found)), 8, 8) for name, found in readers.items())
    return Profile(tuple(layers), tensors, 4)


def test_of_many_blocks_that_are_alike_one_is_drawn() -> None:
    for cross in (False, True):
        few, many = lines(transformer(4, cross=cross)), lines(transformer(48, cross=cross))
        assert not any("⋮" in line for line in few)
        assert (len(many) < 20, max(map(len, many)) <= 80) == (True, True)
        (elided,) = [line for line in many if line.startswith("⋮")]
        assert re.search(r"4[67] times more, as far as h\.4[67]\.", elided)
        shares = [float(share) for line in many for share in re.findall(r"([0-9.]+)%", line)]
        assert sum(shares) == pytest.approx(100, abs=1)
        assert ["●" in line for line in many] == [False] * (len(many) - 1) + [True]


def full() -> Profile:
    """A profile that says everything."""
    layers = (
        Layer("h.0", 0.001, 0.002, 4 << 20, 1 << 20, "h.0", "Block", 1e-4, 1e-4, 4096, 0.0005, 2 << 20),
        Layer("h.1", 0.001, 0.002, 4 << 20, 1 << 20, "h.1", "Block", 1e-4, 1e-4, 4096, 0.0005, 2 << 20, "h.0"),
        Layer("loss", 0.0, 0.0, 0, 0, "", "loss"),
    )
    tensors = (Tensor("h.0", "h.0", ("h.1",), 1 << 20, 1 << 20), Tensor("h.1", "h.1", ("loss",), 1 << 20, 1 << 20))
    double = tuple(replace(layer, forward_s=layer.forward_s * 1.5) for layer in layers)
    return Profile(
        layers,
        tensors,
        8,
        model_ref="gpt.py:build",
        model_name="gpt",
        graph_hash="sha256:1f6c",
        provenance=Provenance(
            *("measured", "cpu", "AMD EPYC", "2026-01-31T12:00:00Z", "monotonic clock", "2.13.0", "0.1.0"),
            *(2, 3, 30, "torch.export", 1, ("the machine was noisy",)),
        ),
        together=(("h.0", "loss"),),
        whole_forward_s=0.002,
        whole_backward_s=0.005,
        peak_bytes=3 << 30,
        sizes=(Size(16, double, tensors, 0.003, 0.005),),
    )


def test_all_that_a_profile_says_is_shown(run: Run) -> None:
    full().save(Path("gpt.json"))
    shown = run("profile", "show", "gpt.json")
    assert shown.code == 0, shown.err
    text = " ".join(shown.out.split())
    for said in (
        "gpt, microbatch 8: 3 layers (layer), 6 ms forward and backward",
        "measured on AMD EPYC (cpu), 2 threads, 30 passes after 3",
        "2026-01-31T12:00:00Z",
        "monotonic clock",
        "traced by torch.export",
        "torch 2.13.0, pipeplan 0.1.0",
        "model gpt.py:build, graph sha256:1f6c",
        "note: the machine was noisy",
        full().digest(),
        "layers that stay together: h.0, loss",
        "Block = h.0 1.000 2.000 7 50.0 0.500 1.00 4.00 1.00 2.00",
        "sum 3 layers 2.000 4.000 100.0 1.000 2.00 8.00 2.00 2.00",
        "Sum / whole: 1.00, 0.80",
        "Layers that have the times of an identical layer (= its name): 1.",
        "The optimiser's step: 1 ms",
        "Peak memory of a pass and update of the whole model: 3 GiB",
        "Buffers (state that is not a weight): 8 KiB",
        "8: forward 2 ms, backward 4 ms, 750 µs a sample",
        "16: forward 3 ms, backward 4 ms, 438 µs a sample",
        "● h.0",
    ):
        assert said in text, said
    assert "\x1b" not in shown.out


def test_the_most_expensive_come_first_and_slow_reading_is_said_to_be_worth_processes(run: Run) -> None:
    profile = profile_of("ab bc cd", {"c": 0.003, "a": 0.002, "b": 0.0, "d": 0.005})
    for read_s, says in ((2e-4, False), (0.004, True), (0.0, False)):
        replace(profile, read_s=read_s).save(Path("p.json"))
        shown = " ".join(run("profile", "show", "p.json", "--no-picture").out.split())
        assert ("Reading the samples of a microbatch" in shown) is bool(read_s)
        assert ("Data(processes=2) reads them in other processes" in shown) is says
    shown = run("profile", "show", "p.json", "--top", "2", "--no-picture").out
    rows = [line.split() for line in shown.splitlines() if re.match(r"(c|d|2 others|sum) ", line)]
    assert [row[0] for row in rows] == ["d", "c", "2", "sum"]
    assert rows[2][1:4] == ["others", "2.000", "0.000"]
    assert (rows[3][-4], "graph" in shown) == ("100.0", False)
    found = json.loads(run("profile", "show", "p.json", "--top", "1", "--json").out)
    assert [(layer["name"], layer["share"]) for layer in found["layers"]] == [("d", 0.5)]
    assert (found["sum"]["forward_s"], found["expensive"]) == (pytest.approx(0.010), ["d"])
    assert found["digest"] == Profile.load(Path("p.json")).digest()
    assert "modelled, not measured, for V100" in run("profile", "show", "vgg16-v100", "--top", "3").out
    for name, said in (("vgg16-v10", "did you mean 'vgg16-v100'"), ("missing.json", ""), (".", "")):
        assert said in refused(run, "profile", "show", name)
