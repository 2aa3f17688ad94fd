"""Text for messages: names cleaned for printing, suggestions for misspelt names, and paths in commands to copy."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, line separators, bidirectional overrides, and surrogates."""
MOST_NAMES = 24
"""Largest number of names that are listed."""


def printable(text: str) -> str:
    """Text for terminals: replacement characters instead of bidirectional overrides and most control characters."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


def escaped_json(text: str) -> str:
    """A JSON document with control characters and bidirectional overrides as escapes."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def utc_now() -> str:
    """The present UTC time, in ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def one_line(value: object) -> str:
    """Replace line breaks and control characters by spaces, for a line of output or a comment in a script."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def number_ranges(numbers: Iterable[int]) -> str:
    """Numbers in increasing order as text, with three or more consecutive numbers as a range: `0-2,5,6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def path_word(path: object) -> str:
    """A path that no command mistakes for an option, even if it begins with a dash."""
    text = str(path)
    return f"./{text}" if text.startswith("-") else text


def program_word(path: object) -> str:
    """The path of a program to run.

    The result has a slash, because a shell would search PATH for a name without one.
    """
    word = path_word(path)
    return word if "/" in word else f"./{word}"


def shell_path(path: object) -> str:
    """A path as an argument in a shell command."""
    return shlex.quote(path_word(path))


def shell_program(path: object) -> str:
    """The path of a program at the beginning of a shell command."""
    return shlex.quote(program_word(path))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint such as `did you mean 'a' or 'b'?` for near misses, else the list of all known names."""
    names = list(known)
    by_folded = {candidate.lower(): candidate for candidate in reversed(names)}
    near = [by_folded[match] for match in difflib.get_close_matches(name.lower(), by_folded, n=3, cutoff=0.5)]
    if near:
        return f"did you mean {' or '.join(repr(match) for match in near)}?"
    listed = ", ".join(names[:MOST_NAMES])
    return f"there are: {listed}" + (f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else "")


def near_files(path: Path) -> str:
    """A hint such as `; did you mean 'profile.json'?`; empty if the folder has no file of a similar name and suffix."""
    try:
        names = [file.name for file in path.parent.iterdir() if file.suffix == path.suffix and file.is_file()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near and near[0] != path.name else ""
