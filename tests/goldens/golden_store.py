"""The sections of the goldens, and how they are stored: a folder of `data/` for each, with one file for each text."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import golden_streams
import golden_texts

DATA = Path(__file__).resolve().parent / "data"
SUFFIX = ".txt"
"""Every stored text has this suffix, so that no tool takes a stored script for one of the repository's own."""
SECTIONS: Mapping[str, Callable[..., dict[str, str]]] = {
    "files": golden_texts.files,
    "api": golden_texts.api,
    "streams": golden_streams.streams,
}


def chosen(names: Sequence[str]) -> list[str]:
    """The sections of these names, all without any. Raises `SystemExit` where there is none of a name."""
    if unknown := set(names) - set(SECTIONS):
        raise SystemExit(f"there is no section {', '.join(sorted(unknown))}; the sections are: {', '.join(SECTIONS)}")
    return list(names or SECTIONS)


def write(section: str, texts: Mapping[str, str]) -> None:
    """Replace the goldens of a section."""
    shutil.rmtree(DATA / section, ignore_errors=True)
    for key, text in texts.items():
        path = DATA / section / f"{key}{SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def read(section: str) -> dict[str, str]:
    """The goldens of a section."""
    folder = DATA / section
    # Bytes, because `read_text` would translate line ends.
    return {
        path.relative_to(folder).as_posix().removesuffix(SUFFIX): path.read_bytes().decode("utf-8")
        for path in sorted(folder.rglob(f"*{SUFFIX}"))
        if path.is_file()
    }


def differences(frozen: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """One description for every text that is missing, new or different."""
    found = [f"missing now: {key}" for key in sorted(frozen.keys() - current.keys())]
    found += [f"not in the goldens: {key}" for key in sorted(current.keys() - frozen.keys())]
    for key in sorted(frozen.keys() & current.keys()):
        if frozen[key] != current[key]:
            before, after = frozen[key].splitlines(), current[key].splitlines()
            lines = difflib.unified_diff(before, after, f"{key} (frozen)", f"{key} (now)", lineterm="", n=1)
            found.append("\n".join(lines) or f"{key}: only the line ends differ")
    return found
