"""How goldens are stored under `data/`, and how they are compared.

A section is either a table or a set of texts. A table is one file of JSON lines, sorted by key; every float is written
by `repr`, so that it is read back exactly, and compared without any tolerance unless the caller gives one. A set of
texts is a folder with one file for each text, so that differences are readable in `git diff` too.
"""

from __future__ import annotations

import difflib
import json
import math
import shutil
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
SUFFIX = ".txt"
"""Every stored text has this suffix, so that no tool takes a stored script for one of the repository's own."""

Entries = dict[str, Any]


def size_of(section: str) -> int:
    """The bytes that a section takes on disk."""
    folder, table = DATA / section, DATA / f"{section}.jsonl"
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else [table]
    return sum(path.stat().st_size for path in files)


def write(section: str, entries: Entries) -> None:
    """Replace the goldens of a section."""
    folder, table = DATA / section, DATA / f"{section}.jsonl"
    shutil.rmtree(folder, ignore_errors=True)
    table.unlink(missing_ok=True)
    DATA.mkdir(exist_ok=True)
    if all(isinstance(value, str) for value in entries.values()):
        for key, text in sorted(entries.items()):
            path = folder / f"{key}{SUFFIX}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")
        return
    lines = [json.dumps({"key": key, **value}, ensure_ascii=False) for key, value in sorted(entries.items())]
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(section: str) -> Entries:
    """The goldens of a section. Raises `FileNotFoundError` where it was never frozen."""
    folder, table = DATA / section, DATA / f"{section}.jsonl"
    if folder.is_dir():
        paths = sorted(path for path in folder.rglob(f"*{SUFFIX}") if path.is_file())
        # Bytes, because `read_text` would translate line ends.
        return {
            path.relative_to(folder).as_posix().removesuffix(SUFFIX): path.read_bytes().decode("utf-8")
            for path in paths
        }
    rows = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    return {row.pop("key"): row for row in rows}


def differences(frozen: Entries, current: Entries, tolerance: float = 0.0) -> list[str]:
    """One description for every entry that is missing, new or different; several lines each for texts."""
    found = [f"missing now: {key}" for key in sorted(frozen.keys() - current.keys())]
    found += [f"not in the goldens: {key}" for key in sorted(current.keys() - frozen.keys())]
    for key in sorted(frozen.keys() & current.keys()):
        before, after = frozen[key], current[key]
        if isinstance(before, str) and isinstance(after, str):
            if before != after:
                found.append(_text_difference(key, before, after))
            continue
        # What is stored went through JSON: tuples became lists.
        after = json.loads(json.dumps(after))
        fields = [name for name in {**before, **after} if not _equal(before.get(name), after.get(name), tolerance)]
        if fields:
            lines = [f"  {name}: {before.get(name)!r} -> {after.get(name)!r}" for name in fields]
            found.append("\n".join([key, *lines]))
    return found


def _text_difference(key: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{key} (frozen)", f"{key} (now)", lineterm="", n=1
    )
    return "\n".join(lines) or f"{key}: only the line ends differ"


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=tolerance, abs_tol=0.0)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)
