"""Device files, and what the executor costs on this machine, which is kept in the user's cache."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run, check_refusals
from repository import ROOT

import pipeplan
from pipeplan.cluster_data import devices, machine_costs
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.cluster_data.cluster_toml import read_cluster, write_cluster
from pipeplan.cluster_data.devices import ARITHMETICS, OPERATOR_KINDS
from pipeplan.cluster_data.executor_costs import NO_COSTS, ExecutorCosts
from pipeplan.cluster_data.machine_costs import IdleCores, MachineCosts
from pipeplan.errors import InputError
from pipeplan.util.files import Node

BUNDLED = ROOT / "profiles" / "devices"


def text() -> str:
    return (BUNDLED / "v100.toml").read_text(encoding="utf-8")


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


COSTS = ExecutorCosts(240e-6, 90e-6, 0.8e-9, 0.1e-9, "measured on this machine at noon", 250 * 2**20, 0.25, 0.5)
MEASURED = MachineCosts(
    COSTS, {1: 1.0, 2: 1.6, 3: 1.75}, "2026-01-01T12:00:00Z", alone_pass_s=200e-6, idle=IdleCores(2, 0.2, 0.004)
)
LAB = Cluster("lab", Device("cpu", "cpu", 2**30), (Level("server", 3, 1e9),))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(machine_costs.SWITCH, "on")
    return machine_costs.cache_file()


def test_what_was_measured_is_read_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of another machine or version, not from a damaged file, and not where it is switched off."""
    assert machine_costs.machine_costs() is None
    machine_costs.save(MEASURED)
    assert machine_costs.machine_costs() == MEASURED
    good = cache.read_text()
    others = [json.dumps(json.loads(good) | {name: "another"}) for name in ("machine", "torch", "pipeplan")]
    for text in (*others, good[:-20]):
        cache.write_text(text)
        assert machine_costs.machine_costs() is None
    cache.write_text(good)
    monkeypatch.setenv(machine_costs.SWITCH, "off")
    assert machine_costs.machine_costs() is None


def test_the_longer_workers_compute_the_less_cores_are_idle() -> None:
    assert MEASURED.in_use(2, 1.0) == MEASURED.in_use(1) == 1, "every worker has a core"
    assert MEASURED.in_use(3) == MEASURED.in_use(3, 0.004) == MEASURED.in_use(3, 0.001) == pytest.approx(0.8)
    assert MEASURED.in_use(3, 0.016) == pytest.approx(0.9)
    assert MEASURED.in_use(5, 0.4) == pytest.approx(0.98)


def test_a_lone_worker_is_not_charged_as_beside_others(cache: Path) -> None:
    machine_costs.save(MEASURED)
    alone = machine_costs.with_one_worker(machine_costs.with_machine_costs(LAB))
    assert alone.executor == replace(COSTS, pass_s=200e-6)
    assert machine_costs.with_machine_costs(machine_costs.with_one_worker(LAB)) == alone
    stated = replace(LAB, executor=replace(COSTS, pass_s=1e-3))
    assert machine_costs.with_one_worker(stated).executor == stated.executor, "what a cluster file states"


def test_the_local_cluster_has_it_with_whole_cores_for_layers_measured_under_load(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeplan.api.local_cluster", lambda workers: replace(LAB, name="local"))
    assert pipeplan.cluster("local", workers=3).executor == NO_COSTS
    machine_costs.save(MEASURED)
    found = pipeplan.cluster("local", workers=3)
    assert (found.executor, found.device.cores, found.shared_cores) == (COSTS, 1.4, [(0, 3, 1.4)])
    for workers, cores in ((2, 0), (3, 2)):
        cluster = machine_costs.with_machine_costs(replace(LAB, levels=(replace(LAB.levels[0], count=workers),)))
        assert machine_costs.whole_cores(cluster).device.cores == cores


def test_a_cluster_file_can_ask_for_it_or_state_it(cache: Path, tmp_path: Path) -> None:
    lab = tmp_path / "lab.toml"
    write_cluster(LAB, lab)
    text = lab.read_text().replace('name = "lab"', 'name = "lab"\nexecutor = "local"')
    lab.write_text(text)
    assert read_cluster(lab) == LAB
    machine_costs.save(MEASURED)
    assert read_cluster(lab) == machine_costs.with_machine_costs(LAB) != LAB
    lab.write_text(text.replace('executor = "local"', 'executor = "there"'))
    with pytest.raises(InputError, match="'there'"):
        read_cluster(lab)
    stated = replace(LAB, executor=COSTS, device=replace(LAB.device, cores=1.6))
    write_cluster(stated, lab)
    assert 'pass = "240 us"' in lab.read_text()
    assert read_cluster(lab) == stated
    assert "executor" not in LAB.to_json()
    assert cluster_from_json(Node(json.loads(json.dumps(stated.to_json())), "plan.json")) == stated
    with pytest.raises(InputError, match="pass_s"):
        ExecutorCosts(pass_s=-1.0)
