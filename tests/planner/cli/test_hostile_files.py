"""Files and names that nobody should have to read, in one line, and profiles that leave work out."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run, refused
from long_chains import long_chain

from pipeplan.cli import LONGEST
from pipeplan.util.files import bundled_folder

CLUSTER = (bundled_folder("profiles") / "clusters" / "A.toml").read_text(encoding="utf-8")
PROFILE = (bundled_folder("profiles") / "mnist-v100.json").read_text(encoding="utf-8")
TERMINAL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
QUICK = ("--solver", "dp", "--schedule", "1f1b-stashing")
EVIL = "[/x]\x1b[2J\x9b31mA\u202eB\u2066C\rD\x7f"
NUMBERS = (
    ("^count = .*", "count = " + "9" * 5000),
    ("^count = .*", "count = 0x" + "f" * 5000),
    ("^bandwidth = .*", "bandwidth = 1" + "0" * 400),
    ("^bandwidth = .*", 'bandwidth = "1' + "0" * 400 + ' GB/s"'),
    ("^bandwidth = .*", "bandwidth = 1e300"),
    ("^bandwidth = .*", 'bandwidth = "1e300 B/s"'),
    ("^count = 4", "count = 4\nallreduce_efficiency = 1e-320"),
    ("^count = 4", "count = 4\nsendrecv_efficiency = 1e-9"),
    ("^memory = .*", "memory = 1" + "0" * 400),
    ("^name = .*", "name = 2024-13-45"),
)


def test_numbers_that_no_cluster_or_layer_has(run: Run, tmp_path: Path) -> None:
    path, profile = tmp_path / "cluster.toml", tmp_path / "profile.json"
    for pattern, text in NUMBERS:
        path.write_text(re.sub(pattern, text, CLUSTER, flags=re.MULTILINE))
        assert len(refused(run, "list", "clusters", str(path))) < 2 * LONGEST
        assert len(refused(run, "solve", "mnist-v100", "--cluster", str(path), "-o", "p")) < 2 * LONGEST
    for field in ("parameter_bytes", "saved_bytes", "buffer_bytes"):
        for value in (2**63 - 1, 2**53 + 2):
            document = json.loads(PROFILE)
            document["layers"][0][field] = value
            profile.write_text(json.dumps(document))
            refused(run, "solve", str(profile), "--cluster", "local", "--workers", "2", "-o", "p")


READING = (
    *("solve FILE --cluster A", "solve mnist-v100 --cluster FILE", "profile show FILE", "profile diff FILE FILE"),
    *("import FILE", "check FILE", "explain FILE", "simulate FILE", "sweep FILE --cluster A", "list clusters FILE"),
)


def test_what_is_no_regular_file(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(2**40)
    for path in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path / "huge.json")):
        for command in READING:
            refused(run, *command.replace("FILE", path).split())


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


LEFT_OUT = "the work of 'experts' (opaque) is not counted"
LINE = f"INCOMPLETE, all times are too short and all rates too high: {LEFT_OUT}"


@pytest.fixture
def plan(tmp_path: Path, run: Run) -> Path:
    """A folder with a plan from an incomplete profile."""
    profile = long_chain(4)
    profile = replace(profile, provenance=replace(profile.provenance, kind="modelled", incomplete=LEFT_OUT))
    profile.save(tmp_path / "profile.json")
    found = run("solve", str(tmp_path / "profile.json"), "--cluster", "A", "-o", str(tmp_path / "plan"))
    assert found.out.splitlines()[0] == LINE
    return tmp_path / "plan"


def test_answers_begin_with_it(plan: Path, run: Run) -> None:
    profile = str(plan.parent / "profile.json")
    for command in (
        ["solve", profile, "--cluster", "A", "--no-write"],
        ["explain", str(plan)],
        ["explain", profile, "--cluster", "A"],
        ["sweep", profile, "--cluster", "A", "--servers", "1", "--jobs", "1"],
        ["check", str(plan)],
        ["simulate", str(plan)],
        ["replan", str(plan), "--lost", "server3", "--no-write"],
        ["profile", "show", profile],
    ):
        found = run(*command)
        assert " ".join(found.out.split()).startswith(LINE), command
    beside = run("check", str(plan), "--json")
    assert json.loads(beside.out)["format"] == "pipeplan-check"
    assert LINE in beside.err
    assert json.loads(run("report", str(plan), "--json").out)["notes"][0] == f"{LINE}."
