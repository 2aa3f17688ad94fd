"""The kinds of random cases, and how one of them is run and judged."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import cases
from drive import call, complaint, listing

Arguments = Callable[[random.Random, list[Path]], list[str]]
Reading = Callable[[random.Random, list[Path]], str]

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
READERS: dict[str, Reading] = {
    "stages": cases.executor_reads,
    "devices": cases.estimating,
    "manifests": cases.manifest_read,
}
"""Kinds that are files for the executor's readers."""
ALL_KINDS = (*COMMANDS, *READERS)


def run_case(kind: str, seed: int, planned: list[Path], folder: Path) -> str:
    """What is wrong with how one case ended, empty where nothing is. Leaves this process in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)
    with mock.patch.dict(os.environ):
        return _run(kind, seed, planned, folder)


def _run(kind: str, seed: int, planned: list[Path], folder: Path) -> str:
    rng = random.Random(f"{kind} {seed}")
    if kind in READERS:
        wrong = READERS[kind](rng, planned)
        return f"{kind} {seed}: {wrong}" if wrong else ""
    arguments = COMMANDS[kind](rng, planned)
    before = listing(folder)
    ended = call(arguments)
    wrong = complaint(ended, before, listing(folder))
    return f"{kind} {seed}: pipeplan {' '.join(arguments)!r}: {wrong}" if wrong else ""
