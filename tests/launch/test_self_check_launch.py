"""A run begins with the self-check, unless --no-self-check leaves it out; a profile records which it was."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checked_models import lose_writes
from launch_scripts import render
from repository import ROOT
from toy_workers import stage_contents, write_plan

from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model

JOB = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from checked_models import Inside, counts_in_file, job, plain

def good():
    return job(plain())

def counting():
    return job(counts_in_file())

def inside():
    return job(Inside())
"""
DIFFERS = "self-check: the attribute 'CALLS' of the file checked_models changes .* in minibatch 0, so .*"
UNCHECKED = "not self-checked, whether the plan's stages train as the model alone does (--no-self-check)"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(JOB)
    return tmp_path / "jobs.py"


@pytest.mark.skipif(sys.platform != "linux", reason="starts workers as on Linux")
def test_a_run_that_would_differ_starts_unchecked_only(jobs: Path) -> None:
    contents = stage_contents([1, 1], minibatch=4)
    for content, layers in zip(contents, (["0", "1"], ["2", "3", "4", "loss"]), strict=True):
        content |= {"model": {"ref": f"{jobs}:counting", "graph_hash": None}, "layers": layers}
    script = render(write_plan(jobs.parent / "plan", contents))
    refused, unchecked = (
        subprocess.run([str(script), "--epochs", "1", *more], capture_output=True, text=True, timeout=120, check=False)
        for more in ((), ("--no-self-check",))
    )
    assert (refused.returncode, unchecked.returncode) == (2, 0), unchecked.stderr
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(f"error: {DIFFERS}", line), line
    assert f"note: {UNCHECKED}" in unchecked.stderr.splitlines()
    assert len(list((jobs.parent / "plan").glob("runs/*/checkpoints/*"))) == 1


def profiled(jobs: Path, function: str, **options: Any) -> Profile:
    """A profile, through its file."""
    profile_model(f"{jobs}:{function}", ProfilerOptions(repeats=1, warmup=1, **options)).save(
        jobs.parent / "profile.json"
    )
    return Profile.load(jobs.parent / "profile.json")


def test_a_profile_that_would_differ_is_made_unchecked_only(jobs: Path) -> None:
    with pytest.raises(InputError, match=DIFFERS):
        profiled(jobs, "counting")
    profile = profiled(jobs, "counting", self_check=False)
    assert profile.unchecked == "--no-self-check"
    assert any("not self-checked" in note for note in profile.provenance.notes)
    profile = profiled(jobs, "good")
    assert (profile.unchecked, profile.taken_whole) == ("", ())
    assert "unchecked" not in profile.to_json()["model"]


def test_a_module_that_would_differ_is_taken_whole(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_writes(monkeypatch, "body.mean", "body")
    profile = profiled(jobs, "inside")
    assert profile.taken_whole == ("body",)
    assert profile.provenance.traced == "torch.export; taken whole: body"
    assert any("taken whole, as their stages" in note for note in profile.provenance.notes)
