import pytest

from pipeplan.errors import InputError
from pipeplan.util.units import parse_rate, parse_size, parse_time, show_pace, show_rate, show_size, show_time


@pytest.mark.parametrize(
    ("text", "value"), [("16 GiB", 16 * 2**30), ("16GB", 16 * 10**9), (1024, 1024), ("1.5 KiB", 1536), ("7 B", 7)]
)
def test_sizes(text: object, value: int) -> None:
    assert parse_size(text, "here") == value


@pytest.mark.parametrize(("text", "value"), [("10 Gbit/s", 1.25e9), ("12 GB/s", 12e9), (5e9, 5e9), ("8 bit/s", 1.0)])
def test_rates(text: object, value: float) -> None:
    assert parse_rate(text, "here") == value


@pytest.mark.parametrize(("text", "value"), [("5 us", 5e-6), ("2 ms", 2e-3), (0.5, 0.5), ("1e-6 s", 1e-6)])
def test_times(text: object, value: float) -> None:
    assert parse_time(text, "here") == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["ten", "-1 GB", "5 GB/s", "", True, None, "nan GB", float("nan"), float("inf"), [1]])
def test_what_is_no_size_is_said_with_its_place(text: object) -> None:
    with pytest.raises(InputError, match=r"cluster.toml: memory: expected a size"):
        parse_size(text, "cluster.toml: memory")


def test_people_read_short_figures() -> None:
    assert [show_time(t) for t in (0, 20e-6, 0.0259, 0.825)] == ["0", "20 µs", "25.9 ms", "825 ms"]
    assert [show_size(s) for s in (0, 12, 2048, 8.75 * 2**30)] == ["0", "12 B", "2 KiB", "8.75 GiB"]
    assert show_rate(1.25e9) == "10 Gbit/s"


@pytest.mark.parametrize(
    ("per_s", "text"),
    [
        (49.904, "49.9"),
        (3193.6, "3194"),
        (282784, "282800"),
        (0.012346, "0.01235"),
        (999.96, "1000"),
        (25030.4, "25030"),
    ],
)
def test_paces_have_four_digits_and_no_exponent(per_s: float, text: str) -> None:
    assert show_pace(per_s) == text
