"""Every answer from a profile that leaves work out begins with that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run
from long_chains import long_chain

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


def test_a_profile_of_other_hardware_is_noted_by_every_command(run: Run, tmp_path: Path) -> None:
    profile, plan = "mnist-v100", str(tmp_path / "plan")
    for command in (
        ["solve", profile, "--cluster", "C", "--solver", "dp", "-o", plan],
        ["explain", plan, "--samples", "0"],
        ["sweep", profile, "--cluster", "C", "--jobs", "1"],
        ["check", plan],
        ["simulate", plan],
        ["report", plan],
        ["replan", plan, "--lost", "server3", "--no-write", "--solver", "dp"],
    ):
        found = run(*command)
        assert found.code == 0, found.err
        assert found.err.count("the profile is for V100 SXM2 16 GB, and cluster C") == 1, command
