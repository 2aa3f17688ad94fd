"""Quantities as text, and whole numbers where fractions belong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.errors import InputError
from pipeplan.problem.options import Options
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node
from pipeplan.util.text import shell_path, shell_program
from pipeplan.util.units import parse_rate, parse_size, parse_time, show_rate, show_size, show_step_time, show_time

SIZES = {"16 GiB": 16 * 2**30, "16GB": 16 * 10**9, 1024: 1024, "1.5 KiB": 1536, "7 B": 7}
RATES = {"10 Gbit/s": 1.25e9, "12 GB/s": 12e9, 5e9: 5e9, "8 bit/s": 1.0}
TIMES = {"5 us": 5e-6, "2 ms": 2e-3, 0.5: 0.5, "1e-6 s": 1e-6}
WRONG = ("ten", -1, "-1 GB", "5 GB/s", "", True, None, "nan GB", float("nan"), float("inf"), [1])


def test_quantities_are_read_with_their_units() -> None:
    assert {text: parse_size(text, "here") for text in SIZES} == SIZES
    assert {text: parse_rate(text, "here") for text in RATES} == RATES
    assert {text: parse_time(text, "here") for text in TIMES} == pytest.approx(TIMES, rel=1e-12)
    for text in WRONG:
        with pytest.raises(InputError, match=r"cluster.toml: memory: expected a size"):
            parse_size(text, "cluster.toml: memory")


def test_people_read_short_figures() -> None:
    assert [show_time(t) for t in (0, 20e-6, 0.0259, 0.825)] == ["0", "20 µs", "25.9 ms", "825 ms"]
    assert [show_size(s) for s in (0, 12, 2048, 8.75 * 2**30)] == ["0", "12 B", "2 KiB", "8.75 GiB"]
    assert show_rate(1.25e9) == "10 Gbit/s"
    step_times = {49.904: "49.9", 3193.6: "3194", 282784: "282800", 0.012346: "0.01235", 25030.4: "25030"}
    step_times[999.96] = "1000"
    assert {per_s: show_step_time(per_s) for per_s in step_times} == step_times, "four digits and no exponent"


def test_a_path_is_neither_an_option_nor_looked_up() -> None:
    for path, argument, program in (
        ("plan", "plan", "./plan"),
        ("-plan/launch.sh", "./-plan/launch.sh", "./-plan/launch.sh"),
        ("-a b", "'./-a b'", "'./-a b'"),
        ("/x/-plan", "/x/-plan", "/x/-plan"),
    ):
        assert (shell_path(Path(path)), shell_program(path)) == (argument, program)


def _profile(number: type) -> Profile:
    """A profile of two layers whose figures are all of one type."""
    layers = [Layer(name, number(1), number(2), number(4), number(8), "", "", number(0), number(0)) for name in "ab"]
    tensor = Tensor("x", "a", ("b",), number(4), number(4))
    return Profile(tuple(layers), (tensor,), number(4), optimizer_state_ratio=number(1), whole_forward_s=number(2))


def test_whole_numbers_equal_the_fractions_that_files_hold_digests_included(tmp_path: Path) -> None:
    for number in (int, float, np.int64, np.float32):
        for made, expected in zip(_clusters(number), _clusters(float), strict=True):
            read = cluster_from_json(Node(json.loads(json.dumps(made.to_json())), "cluster"))
            assert (read, read.digest(), made.digest()) == (made, made.digest(), expected.digest())
        profile = _profile(number)
        profile.save(tmp_path / "profile.json")
        assert Profile.load(tmp_path / "profile.json").digest() == profile.digest() == _profile(float).digest()
    assert Device("d", "cpu", 1.5).memory_bytes == 1.5  # type: ignore[arg-type]
    assert isinstance(Options(overlap=1).overlap, float)


def _clusters(number: type) -> tuple[Cluster, Cluster]:
    """A cluster of equal servers, and one of two servers that differ, whose figures are all of one type."""
    device, join = Device("d", "cuda", number(2**30), number(1)), Level("cluster", number(2), number(10**9))
    inside = Level("server", 2, number(12_000_000_000), number(0), number(1), number(1))
    machines = [Server(device, Level("server", count, number(10**9)), number(10**8), number(2)) for count in (1, 2)]
    return Cluster("lab", device, (inside, join), (), number(3)), Cluster.of_servers("mixed", machines, [join])
