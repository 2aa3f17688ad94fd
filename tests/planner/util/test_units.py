"""Quantities are read from text and shown in short, and paths in printed commands hold as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeplan.errors import InputError
from pipeplan.util.text import shell_path, shell_program
from pipeplan.util.units import parse_rate, parse_size, parse_time, show_rate, show_size, show_step_time, show_time

SIZES = {"16 GiB": 16 * 2**30, "16GB": 16 * 10**9, 1024: 1024, "1.5 KiB": 1536, "7 B": 7}
RATES = {"10 Gbit/s": 1.25e9, "12 GB/s": 12e9, 5e9: 5e9, "8 bit/s": 1.0}
TIMES = {"5 us": 5e-6, "2 ms": 2e-3, 0.5: 0.5, "1e-6 s": 1e-6}
WRONG = ("ten", "-1 GB", "5 GB/s", "", True, None, "nan GB", float("nan"), float("inf"), [1])


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
