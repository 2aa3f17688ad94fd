"""Plants faults in the code, one at a time, and counts those that the tests catch.

    python tests/evaluation/planted_faults.py [--only WORD] [--list] [--all-tests]

A fault replaces one text of one file, in a copy of the working tree. It is caught if a test of the folders that are
named beside it fails; with `--all-tests` the whole default suite runs. A fault whose text is not found exactly once is
an error: the code has changed, and the fault must be written anew. After a refactoring at least as many faults are
caught as before.

The faults are in `planted_faults.txt`. A line `## FILE: TESTS` names the file of the faults below it, and the folders
of the tests that should notice. A fault has its name, the text in lines that begin with `-`, and what replaces it in
lines that begin with `+`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "planner",
    "launch",
    "profiles",
    "templates",
    "tests",
    "docs",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
)
MOST_S = 1800
"""Seconds after which a run of the tests is ended. A fault that makes tests hang counts as caught."""


@dataclass(frozen=True)
class Fault:
    """A change of one text of one file that makes the product wrong."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Folders and files of the tests that should notice."""


def _read(path: Path) -> Iterator[Fault]:
    """The faults of a list."""
    file = tests = ""
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        name, *lines = block.split("\n")
        if name.startswith("## "):
            file, _, tests = name.removeprefix("## ").partition(": ")
            continue
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        yield Fault(name, file, old, new, tuple(tests.split()))


FAULTS = tuple(_read(Path(__file__).with_suffix(".txt")))


def problems(tree: Path) -> list[str]:
    """What is wrong with the list: a text that is not there once, a name used twice, a missing test."""
    found = []
    for fault in FAULTS:
        file = tree / fault.file
        count = file.read_text(encoding="utf-8").count(fault.old) if file.is_file() else -1
        if count != 1:
            found.append(f"{fault.name}: {fault.file} has the text {count} times" if count >= 0 else f"no {fault.file}")
        found += [f"{fault.name}: no {path}" for path in fault.tests if not (tree / path).exists()]
    names = [fault.name for fault in FAULTS]
    return found + [f"{name}: named twice" for name in set(names) if names.count(name) > 1]


def is_caught(fault: Fault, tree: Path, all_tests: bool) -> bool:
    """Whether the tests fail with the fault planted in the tree, which is then mended."""
    file = tree / fault.file
    before = file.read_text(encoding="utf-8")
    file.write_text(before.replace(fault.old, fault.new), encoding="utf-8")
    paths = ["tests"] if all_tests else list(fault.tests)
    environment = os.environ | {"PYTHONPATH": f"{tree / 'planner'}:{tree / 'launch'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider", *paths]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=MOST_S, check=False)
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(before, encoding="utf-8")


def main() -> None:
    """Plant the faults, and print which are caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", metavar="WORD", help="only faults whose name has this word")
    parser.add_argument("--list", action="store_true", help="print the faults, and check that they can be planted")
    parser.add_argument("--all-tests", action="store_true", help="run the whole default suite for every fault (hours)")
    options = parser.parse_args()
    if found := problems(ROOT):
        sys.exit("\n".join(found))
    chosen = [fault for fault in FAULTS if options.only is None or options.only in fault.name]
    if options.list:
        print("\n".join(f"{fault.name:50} {fault.file}" for fault in chosen))
        return
    missed = []
    with tempfile.TemporaryDirectory(prefix="pipeplan-faults-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, tree / name, ignore=ignored) if source.is_dir() else shutil.copy(source, tree)
        for fault in chosen:
            began = time.monotonic()
            caught = is_caught(fault, tree, options.all_tests)
            missed += [] if caught else [fault.name]
            print(f"{'caught' if caught else 'MISSED'} {fault.name:50} {time.monotonic() - began:5.0f} s", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught")
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
