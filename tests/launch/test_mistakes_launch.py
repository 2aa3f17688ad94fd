"""What people do wrong with launch.sh: the lines of docs/errors.md are the lines that they get, before any worker
starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import Launch, render
from repository import ROOT
from toy_workers import stage_contents, write_plan

import pipeplan
from pipeplan.first_steps import init
from pipeplan_launch import supervisor

PAGE = ROOT / "docs" / "errors.md"
TEXT = PAGE.read_text(encoding="utf-8") + (ROOT / "tests" / "support" / "more_mistakes.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([^|`]+?) +\| `([^`]*launch\.sh[^`]*)` +\| `([^`]+)` +\|$", re.MULTILINE)
ROWS = {mistake: (typed, said) for mistake, typed, said in ROW.findall(TEXT)}
CHANGED, FULL, GPUS = (
    "a model changed since it was profiled",
    "a full disk for the run",
    "a plan for GPUs, and none here",
)
ABSENT = """
import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
"""
"""A sitecustomize.py that has this interpreter find no torch."""


def matches(said: str, line: str) -> bool:
    """Whether a line is what the page says, where … stands for what differs."""
    return re.fullmatch(".*".join(re.escape(part) for part in said.split("…")), line) is not None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a plan 1-1 for this machine in `plan`, one for GPUs in `gpus`, one of a job that is `gone`, one for `fsdp`,
    and one that was `edited`.
    """
    flush: Any = {"schedule": "1f1b-flush", "accumulate": 2}
    for name, contents, changes in (
        ("plan", stage_contents([1, 1]), {}),
        ("gpus", stage_contents([1, 1]), {"device": "cuda"}),
        ("gone", stage_contents([1, 1]), {"model": {"ref": "../gone.py:build", "graph_hash": None}}),
        ("fsdp", stage_contents([2], **flush), {"data_parallel": "fsdp"}),
        ("edited", stage_contents([1, 1], **flush), {"data_parallel": "ddp"}),
    ):
        render(write_plan(tmp_path / name, [one | changes for one in contents]))
    return tmp_path


def content(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def typed_in(folder: Path, typed: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "OMP_NUM_THREADS")}
    command, own = ["bash", "-c", typed], {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=kept | own | environment, timeout=120, check=False
    )


def test_every_row_on_launch_sh_is_found() -> None:
    assert {CHANGED, FULL, GPUS} < ROWS.keys()
    assert len(ROWS) == TEXT.partition("## Running a plan")[2].count("/launch.sh")


@pytest.mark.parametrize(
    "mistake",
    [
        # Looking for GPUs imports torch.
        pytest.param(name, marks=pytest.mark.slow if name == GPUS else ())
        for name in ROWS
        if name not in (CHANGED, FULL)
    ],
)
def test_a_mistake_gets_its_line_and_starts_nothing(mistake: str, folder: Path) -> None:
    typed, said = ROWS[mistake]
    before = content(folder)
    with socket.create_server(("", 0)) as taken:
        done = typed_in(folder, typed, TAKEN=str(taken.getsockname()[1]), **_environment(mistake, folder))
    assert done.returncode == 2
    *notes, line = done.stderr.splitlines()
    assert matches(f"error: {said}", line), line
    assert all(note.startswith("note: ") for note in notes)
    assert done.stdout == ""
    assert content(folder) - {"path", *(f"path/{name}" for name in _PATH)} == before


_PATH = ("sitecustomize.py", "torch", "torch/__init__.py", "torch/version.py")


def _environment(mistake: str, folder: Path) -> dict[str, str]:
    """Where torch is not there, or of another time."""
    if not mistake.startswith("torch "):
        return {}
    (folder / "path" / "torch").mkdir(parents=True)
    if "missing" in mistake:
        (folder / "path" / "sitecustomize.py").write_text(ABSENT)
    elif "imported" in mistake:
        lacks = "raise ImportError('libcudart.so.12: cannot open shared object file')"
        (folder / "path" / "torch" / "__init__.py").write_text(lacks)
    else:
        (folder / "path" / "torch" / "__init__.py").write_text("from torch.version import __version__\n")
        (folder / "path" / "torch" / "version.py").write_text("__version__ = '2.1.0'\n")
    return {"PYTHONPATH": str(folder / "path")}


def test_a_full_disk_is_said_before_anything_is_computed(folder: Path) -> None:
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and namespaces for all users")
    (folder / "full").mkdir()
    typed, said = ROWS[FULL]
    script = f"mount -t tmpfs -o size=64k none full && {typed}; status=$?; find full -mindepth 1; exit $status"
    done = subprocess.run([*inside, "bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert matches(f"error: {said}", done.stderr.splitlines()[-1]), done.stderr
    assert done.stdout == ""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pipeplan init` writes, measured and planned for two workers."""
    place = tmp_path_factory.mktemp("small")
    init.write_starter_files(place, init.starter_files(2))
    command = ["profile", "job.py:build", "--repeats", "2", "--granularity", "module", "-q"]
    subprocess.run([sys.executable, "-m", "pipeplan", *command], cwd=place, check=True, timeout=120)
    profile = pipeplan.read_profile(place / "profile.json")
    pipeplan.render(pipeplan.solve(profile, pipeplan.cluster(place / "cluster.toml")), place / "plan")
    return place


def test_ctrl_c_before_there_is_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "import_problem", interrupted)
    assert supervisor.main([]) == 130
    assert capsys.readouterr().err == "stopped before any worker was started\n"


@pytest.mark.slow
def test_a_model_that_was_changed_since(small: Path, tmp_path: Path) -> None:
    typed, said = ROWS[CHANGED]
    plan = Path(shutil.copytree(small / "plan", tmp_path / "changed"))
    (tmp_path / "changed.py").write_text((small / "job.py").read_text().replace("blocks: int = 4", "blocks: int = 3"))
    for file in plan.glob("stages/*.json"):
        stage = json.loads(file.read_text())
        del stage["checksum"]
        stage["model"]["ref"] = f"{tmp_path / 'changed.py'}:build"
        file.write_text(json.dumps(stage))
    done = typed_in(tmp_path, typed)
    assert done.returncode == 2
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert any(matches(f"error: {said}", line) for line in done.stderr.splitlines()), done.stderr


@pytest.mark.slow
def test_ctrl_c_twice_says_what_goes_on(small: Path, tmp_path: Path) -> None:
    last = re.findall(r"`(stopped: [^`]*)`", PAGE.read_text(encoding="utf-8"))
    with Launch(small / "plan" / "launch.sh", tmp_path / "run", "--epochs", "999") as launch:
        launch.trains()
        for pid in launch.workers().values():
            os.kill(pid, signal.SIGSTOP)  # so that the first Ctrl-C is not enough
        launch.process.send_signal(signal.SIGINT)
        time.sleep(1.5)  # a second Ctrl-C counts from a second after the first on
        launch.process.send_signal(signal.SIGINT)
        assert launch.wait() == 130
        assert launch.lines[-1:] == last
