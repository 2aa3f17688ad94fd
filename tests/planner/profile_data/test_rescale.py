"""Profiles at other minibatch sizes against an oracle in exact fractions, profiles of PipeDream, and comparisons."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from fractions import Fraction
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
from pipeplan.profile_data.rescale import describe_rescaling, halved

TIMES = ("forward_s", "backward_s", "forward_spread_s", "backward_spread_s")
BYTES = ("saved_bytes", "workspace_bytes")
KEPT = ("name", "parameter_bytes", "buffer_bytes", "update_s", "module", "op", "like")
SAMPLES = (1, 2, 3, 5, 8, 12, 16, 24, 31, 64, 100)


def _exact(points: dict[int, Fraction], minibatch: int) -> Fraction:
    """The figure at a size: measured there; in proportion to one size; on the line through the two nearest sizes; and
    beyond them on that line, as far as it neither falls nor would be negative without samples."""
    if minibatch in points:
        return points[minibatch]
    sizes = sorted(points)
    if len(sizes) == 1:
        return points[sizes[0]] * Fraction(minibatch, sizes[0])
    inside = sizes[0] < minibatch < sizes[-1]
    if inside:
        low = max(size for size in sizes if size < minibatch)
        high = min(size for size in sizes if size > minibatch)
        share = Fraction(minibatch - low, high - low)
        return points[low] * (1 - share) + points[high] * share
    end, other = (sizes[0], sizes[1]) if minibatch < sizes[0] else (sizes[-1], sizes[-2])
    slope = (points[end] - points[other]) / (end - other)
    through_zero = points[end] / end
    return points[end] + sorted([Fraction(0), slope, through_zero])[1] * (minibatch - end)


def _profile(rng: random.Random) -> Profile:
    """A chain of layers at one to four sizes, with figures that grow, stay or fall from size to size."""
    minibatches = rng.sample([2, 4, 8, 16, 32, 48], rng.randint(1, 4))
    names = [f"l{index}" for index in range(3)]

    def figures(minibatch: int) -> tuple[tuple[Layer, ...], tuple[Tensor, ...]]:
        layers = tuple(
            Layer(
                name,
                *(rng.randint(0, 6) * minibatch + rng.randint(0, 9) for _ in range(2)),
                parameter_bytes=100,
                saved_bytes=rng.randint(0, 50) * minibatch,
                forward_spread_s=rng.randint(0, 3),
                buffer_bytes=7,
                update_s=3.0,
                workspace_bytes=rng.randint(0, 99),
            )
            for name in names
        )
        sent = [Tensor(f"t{i}", names[i], (names[i + 1],), rng.randint(0, 64), rng.randint(0, 64)) for i in range(2)]
        return layers, tuple(sent)

    sizes = [Size(one, *figures(one), float(rng.randint(0, 99)), 3.0 * one) for one in minibatches]
    own, *others = sizes
    whole = own.whole_forward_s, own.whole_backward_s
    return Profile(
        own.layers,
        own.tensors,
        own.minibatch,
        peak_bytes=9,
        whole_forward_s=whole[0],
        whole_backward_s=whole[1],
        sizes=tuple(others),
    )


@pytest.fixture(scope="module")
def profiles() -> list[Profile]:
    """Random profiles, some with several measured sizes."""
    rng = random.Random(3)
    return [_profile(rng) for _ in range(25)]


def test_every_figure_is_that_of_the_oracle(profiles: list[Profile]) -> None:
    for profile in profiles:
        for minibatch in SAMPLES:
            found = profile.rescaled(minibatch)
            assert found.minibatch == minibatch
            for index, layer in enumerate(found.layers):
                known = {size.minibatch: size.layers[index] for size in profile.all_sizes}
                for name in (*TIMES, *BYTES):
                    exact = _exact({size: Fraction(getattr(at, name)) for size, at in known.items()}, minibatch)
                    assert getattr(layer, name) == pytest.approx(float(exact), rel=1e-12, abs=0.5 * (name in BYTES))
                    assert name in TIMES or isinstance(getattr(layer, name), int)
                assert all(getattr(layer, name) == getattr(profile.layers[index], name) for name in KEPT)
            for name in ("whole_forward_s", "whole_backward_s"):
                whole = {size.minibatch: Fraction(getattr(size, name)) for size in profile.all_sizes}
                assert getattr(found, name) == pytest.approx(float(_exact(whole, minibatch)), rel=1e-12)
            for index, tensor in enumerate(found.tensors):
                ends = {size.minibatch: size.tensors[index] for size in profile.all_sizes}
                for name in ("bytes", "gradient_bytes"):
                    exact = _exact({size: Fraction(getattr(at, name)) for size, at in ends.items()}, minibatch)
                    assert abs(getattr(tensor, name) - exact) <= 0.5
                assert replace(tensor, bytes=0, gradient_bytes=0) == replace(
                    profile.tensors[index], bytes=0, gradient_bytes=0
                )


def test_the_measured_sizes_stay_known(profiles: list[Profile]) -> None:
    for profile in profiles:
        for minibatch in SAMPLES:
            found = profile.rescaled(minibatch)
            if minibatch == profile.minibatch:
                assert found is profile
                continue
            assert found.peak_bytes == 0
            measured = {size.minibatch for size in profile.all_sizes} if profile.sizes else set()
            assert {size.minibatch for size in found.sizes} == measured - {minibatch}
            if minibatch in measured:
                assert found.rescaled(profile.minibatch).layers == profile.layers


def layers(forward: float, backward: float, saved: int) -> tuple[Layer, ...]:
    return (Layer("a", forward, backward, 100, saved, update_s=3.0, buffer_bytes=7), Layer("b", 1.0, 0.0, 0, 0))


def tensors(size: int) -> tuple[Tensor, ...]:
    return (Tensor("a", "a", ("b",), size, size // 2),)


def several() -> Profile:
    """Measured at 16, 8 and 32: forward 2 + m / 8, backward falls beyond 16, saved bytes 10 m."""
    return Profile(
        layers=layers(4.0, 9.0, 160),
        tensors=tensors(64),
        minibatch=16,
        whole_forward_s=5.0,
        whole_backward_s=9.0,
        peak_bytes=1000,
        sizes=(
            Size(8, layers(3.0, 2.0, 80), tensors(32), 4.0, 2.0),
            Size(32, layers(6.0, 8.0, 320), tensors(128), 7.0, 8.0),
        ),
    )


def times(profile: Profile) -> tuple[float, float]:
    return profile.layers[0].forward_s, profile.layers[0].backward_s


def test_pessimistic_times_are_of_the_nearest_size_or_in_proportion_to_it() -> None:
    def rough(minibatch: int) -> Profile:
        return several().rescaled(minibatch, pessimistic=True)

    assert times(rough(4)) == (3.0, 2.0)
    assert times(rough(1)) == (3.0, 2.0)
    assert times(rough(64)) == (12.0, 16.0)
    assert (rough(4).whole_forward_s, rough(64).whole_backward_s) == (4.0, 16.0)
    # Bytes are no estimate, and sizes between measured ones are interpolated as ever.
    assert (rough(4).layers[0].saved_bytes, rough(4).tensors[0].bytes) == (40, 16)
    assert rough(12) == several().rescaled(12)
    assert rough(8) == several().rescaled(8)
    alone = replace(several(), sizes=())
    assert times(alone.rescaled(4, pessimistic=True)) == (4.0, 9.0)
    assert times(alone.rescaled(32, pessimistic=True)) == (8.0, 18.0)
    for minibatch in (1, 2, 3, 5, 7, 33, 64, 100):
        plain, bound = several().rescaled(minibatch), rough(minibatch)
        assert all(low <= high for low, high in zip(times(plain), times(bound), strict=True))


def test_halves_of_a_size() -> None:
    assert halved(64) == [64, 32, 16, 8]
    assert halved(12) == [12, 6, 3]
    assert halved(7) == [7]
    assert halved(64, 0) == [64]


def test_how_it_gets_there_is_said() -> None:
    one = replace(several(), sizes=())
    assert describe_rescaling(one.all_sizes, 8) == "rescaled linearly from microbatch 16 to 8"
    assert describe_rescaling(several().all_sizes, 8) == "at its microbatch of 8"
    assert describe_rescaling(several().all_sizes, 12) == "at microbatch 12 by the line between 8 and 16"
    assert describe_rescaling(several().all_sizes, 4) == "at microbatch 4 by the line beyond 8 and 16"
    assert describe_rescaling(several().all_sizes, 64) == "at microbatch 64 by the line beyond 16 and 32"


def test_sizes_are_unique() -> None:
    with pytest.raises(InputError, match="microbatch size appears twice: 16, 16"):
        replace(several(), sizes=(replace(several().sizes[0], minibatch=16),))


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
