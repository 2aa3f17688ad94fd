"""Files and names that nobody should have to read: one line and exit code 2, and nothing that changes a terminal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import Run

from pipeplan.util.files import bundled_folder

CLUSTER = (bundled_folder("profiles") / "clusters" / "A.toml").read_text(encoding="utf-8")
PROFILE = (bundled_folder("profiles") / "mnist-v100.json").read_text(encoding="utf-8")
TERMINAL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
QUICK = ("--solver", "dp", "--schedule", "1f1b-stashing")
EVIL = "\x1b[2J\x9b31mA\u202eB\u2066C\rD\x7f"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^count = .*", "count = " + "9" * 5000),
        ("^bandwidth = .*", "bandwidth = 1" + "0" * 400),
        ("^bandwidth = .*", 'bandwidth = "1' + "0" * 400 + ' GB/s"'),
        ("^bandwidth = .*", "bandwidth = 1e300"),
        ("^bandwidth = .*", 'bandwidth = "1e300 B/s"'),
        ("^count = 4", "count = 4\nallreduce_efficiency = 1e-320"),
        ("^count = 4", "count = 4\nsendrecv_efficiency = 1e-9"),
        ("^memory = .*", "memory = 1" + "0" * 400),
        ("^name = .*", "name = 2024-13-45"),
    ],
    ids=["digits", "bandwidth", "text", "float", "rate", "tiny share", "small share", "memory", "date"],
)
def test_numbers_that_no_cluster_has(run: Run, tmp_path: Path, pattern: str, text: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(re.sub(pattern, text, CLUSTER, flags=re.MULTILINE))
    for command in (
        ("list", "clusters", str(path)),
        ("solve", "mnist-v100", "--cluster", str(path), "-o", str(tmp_path / "p")),
    ):
        _is_one_line(run(*command))
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("field", ["parameter_bytes", "saved_bytes", "buffer_bytes"])
@pytest.mark.parametrize("value", [2**63 - 1, 2**53 + 2])
def test_sizes_that_no_layer_has(run: Run, tmp_path: Path, field: str, value: int) -> None:
    path = tmp_path / "profile.json"
    document = json.loads(PROFILE)
    document["layers"][0][field] = value
    path.write_text(json.dumps(document))
    _is_one_line(run("solve", str(path), "--cluster", "local", "--workers", "2", "-o", str(tmp_path / "p")))


def _device(_folder: Path) -> str:
    return "/dev/zero"


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def _huge(folder: Path) -> str:
    with (folder / "huge.json").open("wb") as file:
        file.truncate(2**40)
    return str(folder / "huge.json")


@pytest.mark.parametrize("make", [_device, _pipe, _huge])
@pytest.mark.parametrize(
    "command",
    [
        ("solve", "FILE", "--cluster", "A"),
        ("solve", "mnist-v100", "--cluster", "FILE"),
        ("profile", "show", "FILE"),
        ("profile", "diff", "FILE", "FILE"),
        ("import", "FILE"),
        ("check", "FILE"),
        ("explain", "FILE"),
        ("simulate", "FILE"),
        ("sweep", "FILE", "--cluster", "A"),
        ("list", "clusters", "FILE"),
    ],
    ids=lambda command: f"{command[0]}-{command.index('FILE')}",
)
def test_what_is_no_regular_file(
    run: Run, tmp_path: Path, make: Callable[[Path], str], command: tuple[str, ...]
) -> None:
    path = make(tmp_path)
    _is_one_line(run(*(word.replace("FILE", path) for word in command)))


def _is_one_line(ran: object) -> None:
    code, _, err = ran  # type: ignore[misc]
    assert code == 2, err
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert len(line) < 2000


def test_names_do_not_reach_the_terminal_as_they_are(run: Run, tmp_path: Path) -> None:
    cluster, profile = tmp_path / "cluster.toml", tmp_path / "profile.json"
    evil = json.dumps(EVIL).replace("\\u009b", "\x9b")
    small = CLUSTER.replace("count = 4", "count = 2")
    cluster.write_text(re.sub("^name = .*", lambda _: f"name = {evil}", small, flags=re.MULTILINE))
    document = json.loads(PROFILE)
    document["model"]["name"] = EVIL
    document["layers"][0]["name"] = EVIL
    text = json.dumps(document).replace('"from": "' + json.loads(PROFILE)["layers"][0]["name"], '"from": "')
    profile.write_text(text)
    said = []
    for command in (
        ("list", "clusters", str(cluster)),
        ("profile", "show", str(profile)),
        ("solve", "mnist-v100", "--cluster", str(cluster), "-o", str(tmp_path / "plan")),
        ("solve", "mnist-v100", "--cluster", str(cluster), "-o", str(tmp_path / "other"), "--json", *QUICK),
        ("explain", str(tmp_path / "plan")),
        ("simulate", str(tmp_path / "plan")),
        ("sweep", "mnist-v100", "--cluster", str(cluster), "--servers", "1"),
        ("replan", str(tmp_path / "plan"), "--lost", "server1", "-o", str(tmp_path / "new"), *QUICK),
        ("check", str(tmp_path / "plan")),
    ):
        ran = run(*command)
        assert not TERMINAL.search((ran.out + ran.err).replace("\t", "")), command
        said.append(ran.code)
    assert said[0] == said[2] == said[3] == 0
