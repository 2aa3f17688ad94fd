"""Whatever is in a file or on the command line: an answer, or one clear line and exit code 2. Never a traceback, never
a search without end, never half a plan."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import bases
import cases
import pytest
from drive import call, complaint, listing
from extents import slow_but_for

STEP = 25
"""Cases of one test; a case is named by its kind and its seed."""
QUICK, LONG = 50, 2850
"""Cases of every kind: in the default suite, and in the slow one (the seven kinds make 20,300)."""
pytestmark = pytest.mark.fuzz


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sound plan folders."""
    folder = tmp_path_factory.mktemp("planned")
    before = Path.cwd()
    os.chdir(folder)
    try:
        return [folder / made for made in bases.plan_folders()]
    finally:
        os.chdir(before)


Case = Callable[[random.Random, list[Path]], list[str]]
KINDS: dict[str, Case] = {
    "files": lambda rng, planned: cases.solving(rng, "files"),
    "options": lambda rng, planned: cases.solving(rng, "options"),
    "import": lambda rng, planned: cases.importing(rng),
    "plan": cases.replaying,
    "look": cases.looking,
    "odd files": cases.odd_files,
}
READ_BY_EXECUTOR = "stages"


def _run(kind: str, seed: int, planned: list[Path], folder: Path) -> str:
    """What is wrong with one case, empty where nothing is."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)
    if kind == READ_BY_EXECUTOR:
        wrong = cases.executor_reads(random.Random(f"{kind} {seed}"), planned)
        return f"{kind} {seed}: {wrong}" if wrong else ""
    arguments = KINDS[kind](random.Random(f"{kind} {seed}"), planned)
    before = listing(folder)
    ended = call(arguments)
    wrong = complaint(ended, before, listing(folder))
    return f"{kind} {seed}: pipeplan {' '.join(arguments)!r}: {wrong}" if wrong else ""


def _all(kind: str, seeds: range, planned: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    found = [wrong for seed in seeds if (wrong := _run(kind, seed, planned, folder / "case"))]
    assert not found, f"{len(found)} of {len(seeds)} cases:\n" + "\n\n".join(found[:5])


@pytest.mark.parametrize("start", slow_but_for([2000], range(2000, 2000 + 2 * QUICK, STEP)))
@pytest.mark.parametrize("kind", [*KINDS, READ_BY_EXECUTOR])
def test_any_input_ends_well(
    kind: str, start: int, planned: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _all(kind, range(start, start + STEP), planned, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100_000, 100_000 + LONG, STEP))
@pytest.mark.parametrize("kind", [*KINDS, READ_BY_EXECUTOR])
def test_any_input_ends_well_at_length(
    kind: str, start: int, planned: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _all(kind, range(start, start + STEP), planned, tmp_path, monkeypatch)
