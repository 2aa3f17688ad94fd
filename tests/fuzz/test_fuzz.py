"""Whatever is in a file or on the command line: an answer, or one clear line and exit code 2. Never a traceback, never
a search without end, never half a plan."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import cases
import pytest
from drive import call, complaint, listing

STEP = 25
"""Cases of one slow test; a case is named by its kind and its seed."""
SEEDS = range(2000, 3700)
"""Of every kind: twelve kinds make 20,400 cases."""
FEW, FEWEST = 4, 1
"""Quick cases of a kind, and of one whose every case solves a problem."""
SOLVING = ("costs", "checkpoints")
Arguments = Callable[[random.Random, list[Path]], list[str]]
COMMANDS: dict[str, Arguments] = {
    "files": lambda rng, planned: cases.solving(rng, "files"),
    "options": lambda rng, planned: cases.solving(rng, "options"),
    "import": lambda rng, planned: cases.importing(rng),
    "plan": cases.replaying,
    "look": cases.looking,
    "odd files": cases.odd_files,
    "costs": cases.charging,
    "runs": cases.measuring,
    "checkpoints": cases.resuming,
}
"""Kinds that are calls of the command line."""
READERS: dict[str, Callable[[random.Random, list[Path]], str]] = {
    "stages": cases.executor_reads,
    "devices": cases.estimating,
    "manifests": cases.manifest_read,
}
"""Kinds that are files for the executor's readers."""
KINDS = {kind: FEWEST if kind in SOLVING else FEW for kind in (*COMMANDS, *READERS)}
"""Every kind, with the number of its quick cases."""
pytestmark = pytest.mark.fuzz


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sound plan folders."""
    folder = tmp_path_factory.mktemp("planned")
    before = Path.cwd()
    os.chdir(folder)
    try:
        return [folder / made for made in cases.plan_folders()]
    finally:
        os.chdir(before)


def run_case(kind: str, seed: int, planned: list[Path], folder: Path) -> str:
    """What is wrong with how one case ended, empty where nothing is. Leaves this process in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)
    rng = random.Random(f"{kind} {seed}")
    with mock.patch.dict(os.environ):
        if kind in READERS:
            wrong = READERS[kind](rng, planned)
            return f"{kind} {seed}: {wrong}" if wrong else ""
        arguments = COMMANDS[kind](rng, planned)
        before = listing(folder)
        ended = call(arguments)
    wrong = complaint(ended, before, listing(folder))
    return f"{kind} {seed}: pipeplan {' '.join(arguments)!r}: {wrong}" if wrong else ""


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        *(pytest.param(kind, SEEDS[:few], id=f"{kind}-first") for kind, few in KINDS.items()),
        *(
            pytest.param(kind, SEEDS[start : start + STEP], id=f"{kind}-{SEEDS[start]}", marks=pytest.mark.slow)
            for kind, few in KINDS.items()
            for start in range(few, len(SEEDS), STEP)
        ),
    ],
)
def test_any_input_ends_well(
    kind: str, seeds: range, planned: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    found = [wrong for seed in seeds if (wrong := run_case(kind, seed, planned, tmp_path / "case"))]
    assert not found, f"{len(found)} of {len(seeds)} cases:\n" + "\n\n".join(found[:5])
