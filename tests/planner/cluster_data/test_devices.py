"""Device files: the bundled ones, a user's own, and what is wrong with others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commandline import Run, check_refusals
from repository import ROOT

from pipeplan.cluster_data import devices
from pipeplan.cluster_data.devices import ARITHMETICS, OPERATOR_KINDS
from pipeplan.errors import InputError

BUNDLED = ROOT / "profiles" / "devices"


def text() -> str:
    return (BUNDLED / "v100.toml").read_text(encoding="utf-8")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text().replace("V100 SXM2 16 GB", "mine").replace('"900 GB/s"', '"1 TB/s"'))
    assert (devices.load_device(str(path)).name, devices.load_device(str(path)).bandwidth.rate) == ("mine", 1e12)


WRONG = (
    ('format = "pipeplan-device"', 'format = "pipeplan-cluster"', "is not a device file"),
    ('name = "V100', 'nane = "V100', "there is no field 'nane'; did you mean 'name'"),
    ("compute = 0.65", "compute = 65", "share: recurrent: compute: expected a finite number of at most 1, found 65"),
    ('rate = "900 GB/s"', 'rate = "fast"', "expected a rate such as"),
    ('rate = "900 GB/s"', 'rate = "900 B/s"', "bandwidth: rate: 900 bytes/s is less than 1000"),
    ('time = "5 us"', 'time = "4000 s"', "kernel: time: 4000 s is more than 3600 s"),
    ('arithmetic = "float32"', 'arithmetic = "tf32"', "there is no peak rate of 'tf32'"),
    ("[bandwidth]", "[bandwidth", "is not valid TOML"),
)
"""What a file says, what it should say instead, and the complaint."""


def test_the_bundled_devices_are_read_by_any_case_and_every_figure_says_where_it_is_from() -> None:
    assert {"v100", "a100", "h100", "h200", "titan-x"} <= set(devices.bundled_device_names())
    for name in devices.bundled_device_names():
        one = devices.load_device(name.upper())
        assert all(one.share_of(kind).source for kind in OPERATOR_KINDS)
        assert (one.peaks["float32"] > 1e12, one.memory > 10**10, bool(one.checked)) == (True, True, True)
        content = (BUNDLED / f"{name}.toml").read_text(encoding="utf-8")
        assert content.count("\nsource = ") == content.count("\n[")
        assert 'source = ""' not in content


def test_what_is_wrong_is_named(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "mine.toml"
    for find, put, complaint in WRONG:
        assert find in text()
        path.write_text(text().replace(find, put, 1))
        with pytest.raises(InputError) as caught:
            devices.load_device(str(path))
        message = str(caught.value)
        assert (message.startswith(str(path)), "\n" in message, complaint in message) == (True, False, True), message
    absent = {"h10": "there is no device 'h10'; did you mean 'h100'", "cude": "did you mean 'cuda'"}
    absent["not.toml"] = "there is no device file not.toml"
    check_refusals(run, {f"profile mnist --device {name}": said for name, said in absent.items()})


def _page() -> str:
    document = (BUNDLED.parents[1] / "docs" / "file-formats.md").read_text(encoding="utf-8")
    return document[document.index("## Device files") : document.index("## plan.json")]


def test_the_page_says_everything_a_device_can(tmp_path: Path) -> None:
    page = _page()
    example = page[page.index("```toml\n") + len("```toml\n") : page.rindex("```")]
    path = tmp_path / "card.toml"
    path.write_text(example, encoding="utf-8")
    card = devices.load_device(str(path))
    assert (card.usable_arithmetic("convolution", "float32"), card.tile and card.tile.sides) == ("tf32", (128, 64))
    assert card.transforms is not None
    assert card.checked
    for name in devices.DeviceFile.__struct_fields__:
        assert f"`{name}`" in page, name
        assert re.search(rf"^\[?{name}\b", example, re.MULTILINE), name
    for kind in (*OPERATOR_KINDS, *ARITHMETICS):
        assert f"`{kind}`" in page, kind
