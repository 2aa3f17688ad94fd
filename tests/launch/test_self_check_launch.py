"""A run begins with the self-check, unless --no-self-check leaves it out; a profile records which it was."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


def launched(jobs: Path, function: str, *options: str) -> subprocess.CompletedProcess[str]:
    """launch.sh of a plan 1-1 of one of the jobs."""
    contents = stage_contents([1, 1], minibatch=4)
    for content in contents:
        content["model"] = {"ref": f"{jobs}:{function}", "graph_hash": None}
        content["layers"] = [["0", "1"], ["2", "3", "4", "loss"]][content["stage"]]
    script = render(write_plan(jobs.parent / "plan", contents))
    command = [str(script), "--epochs", "1", "--log-every", "0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="starts workers as on Linux")
def test_a_run_that_would_differ_does_not_start(jobs: Path) -> None:
    done = launched(jobs, "counting")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(f"error: {DIFFERS}", line), line
    assert not list((jobs.parent / "plan").glob("runs/*/checkpoints/*"))


@pytest.mark.skipif(sys.platform != "linux", reason="starts workers as on Linux")
@pytest.mark.parametrize(("function", "options"), [("good", ()), ("counting", ("--no-self-check",))])
def test_a_run_says_whether_it_was_checked(jobs: Path, function: str, options: tuple[str, ...]) -> None:
    done = launched(jobs, function, *options)
    assert done.returncode == 0, done.stderr
    assert (f"note: {UNCHECKED}" in done.stderr.splitlines()) == bool(options)


QUICK = ProfilerOptions(repeats=1, warmup=1)


def test_a_profile_that_would_differ_is_not_made(jobs: Path) -> None:
    with pytest.raises(InputError, match=DIFFERS):
        profile_model(f"{jobs}:counting", QUICK)


def test_a_profile_records_that_it_was_not_checked(jobs: Path, tmp_path: Path) -> None:
    profile = profile_model(f"{jobs}:counting", ProfilerOptions(repeats=1, warmup=1, self_check=False))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").unchecked == "--no-self-check"
    assert any("not self-checked" in note for note in profile.provenance.notes)


def test_a_profile_that_was_checked_says_nothing(jobs: Path) -> None:
    profile = profile_model(f"{jobs}:good", QUICK)
    assert (profile.unchecked, profile.taken_whole) == ("", ())
    assert "unchecked" not in profile.to_json()["model"]


def test_a_module_that_would_differ_is_taken_whole(jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_writes(monkeypatch, "body.mean", "body")
    profile = profile_model(f"{jobs}:inside", QUICK)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").taken_whole == ("body",)
    assert profile.provenance.traced == "torch.export; taken whole: body"
    assert any("taken whole, as their stages" in note for note in profile.provenance.notes)
