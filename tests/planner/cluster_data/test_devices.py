"""Device files: the bundled ones, a user's own, and what is wrong with others."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from commandline import Run
from repository import ROOT

from pipeplan.cluster_data import devices
from pipeplan.cluster_data.devices import ARITHMETICS, OPERATOR_KINDS
from pipeplan.errors import InputError

BUNDLED = ROOT / "profiles" / "devices"


def text() -> str:
    return (BUNDLED / "v100.toml").read_text(encoding="utf-8")


def test_the_bundled_devices_are_read_by_any_case() -> None:
    assert {"v100", "a100", "h100", "h200", "titan-x"} <= set(devices.bundled_device_names())
    for name in devices.bundled_device_names():
        one = devices.load_device(name.upper())
        assert all(one.share_of(kind).source for kind in OPERATOR_KINDS)
        assert one.peaks["float32"] > 1e12
        assert one.memory > 10**10
        assert one.checked


@pytest.mark.parametrize("name", devices.bundled_device_names())
def test_every_figure_says_where_it_is_from(name: str) -> None:
    content = (BUNDLED / f"{name}.toml").read_text(encoding="utf-8")
    tables = content.count("\n[")
    assert content.count("\nsource = ") == tables
    assert 'source = ""' not in content


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text().replace("V100 SXM2 16 GB", "mine").replace('"900 GB/s"', '"1 TB/s"'))
    assert (devices.load_device(str(path)).name, devices.load_device(str(path)).bandwidth.rate) == ("mine", 1e12)


@pytest.mark.parametrize(
    ("find", "put", "complaint"),
    [
        ('format = "pipeplan-device"', 'format = "pipeplan-cluster"', "is not a device file"),
        ("version = 1", "version = 9", "upgrade pipeplan"),
        ('name = "V100', 'nane = "V100', "there is no field 'nane'; did you mean 'name'"),
        ('kind = "cuda"', 'kind = "tpu"', "expected 'cpu' or 'cuda', found 'tpu'"),
        (
            "compute = 0.65",
            "compute = 65",
            "share: recurrent: compute: expected a finite number of at most 1, found 65",
        ),
        ("[share.pooling]", "[share.poling]", "there is no field 'poling'; did you mean 'pooling'"),
        ("[peak.float32]", "[peak.float23]", "there is no field 'float23'"),
        ("flops = 15.7e12", "flops = 0", "peak: float32: flops: expected at least 1000, found 0"),
        ('rate = "900 GB/s"', 'rate = "fast"', "expected a rate such as"),
        ("sides = [128, 64]", "sides = [128]", "sides: expected a list of 2, found 1 values"),
        ('arithmetic = "float32"', 'arithmetic = "tf32"', "there is no peak rate of 'tf32'"),
        ("[bandwidth]", "[bandwidth", "is not valid TOML"),
    ],
    ids=range(12),
)
def test_what_is_wrong_is_named(tmp_path: Path, find: str, put: str, complaint: str) -> None:
    content = text()
    assert find in content
    path = tmp_path / "mine.toml"
    path.write_text(content.replace(find, put, 1))
    with pytest.raises(InputError) as caught:
        devices.load_device(str(path))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert complaint in message


def test_a_kind_that_is_missing(tmp_path: Path) -> None:
    content = text()
    path = tmp_path / "mine.toml"
    path.write_text(content[: content.index("[share.elementwise]")])
    with pytest.raises(InputError, match="share: the field 'elementwise' is missing"):
        devices.load_device(str(path))


@pytest.mark.parametrize(
    ("device", "complaint"),
    [
        ("h10", "there is no device 'h10'; did you mean 'h100'"),
        ("cude", "did you mean 'cuda'"),
        ("mine.toml", "there is no device file mine.toml"),
    ],
)
def test_a_device_that_is_not_there(run: Run, device: str, complaint: str) -> None:
    done = run("profile", "mnist", "--device", device)
    (line,) = done.err.strip().splitlines()
    assert done.code == 2
    assert complaint in line
    assert not Path("profile.json").exists()


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


def test_damaged_files_are_refused_in_one_line_or_read(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines, path = text().splitlines(), tmp_path / "mine.toml"
    values = ("0", "-1", "1e400", "nan", "[]", "{}", '""', "true", '"9e300 GB/s"', "[[1], 2]", "99999999999999999999")
    complaints = []
    for _ in range(300):
        damaged = list(lines)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(damaged))
            name, equals, _ = damaged[place].partition(" = ")
            changes = [[], [damaged[place]] * 2, [name + equals + draw.choice(values)], [damaged[place][:-2]]]
            damaged[place : place + 1] = draw.choice(changes)
        path.write_text("\n".join(damaged), encoding="utf-8")
        try:
            found = devices.load_device(str(path))
        except InputError as error:
            complaints.append(str(error))
        else:
            assert 0 < found.bandwidth.rate < 1e19
            assert all(0 < share.compute <= 1 for share in map(found.share_of, OPERATOR_KINDS))
    assert 100 < len(complaints) < 300
    assert not any("\n" in one for one in complaints)
