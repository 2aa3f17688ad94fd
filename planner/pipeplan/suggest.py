"""Offer the names nearest to one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

MOST_NAMES = 24
"""That are listed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'?` for near misses, else the whole list of what there is."""
    names = list(known)
    by_folded = {candidate.lower(): candidate for candidate in reversed(names)}
    near = [by_folded[match] for match in difflib.get_close_matches(name.lower(), by_folded, n=3, cutoff=0.5)]
    if near:
        return f"did you mean {' or '.join(repr(match) for match in near)}?"
    listed = ", ".join(names[:MOST_NAMES])
    return f"there are: {listed}" + (f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else "")


def near_files(path: Path) -> str:
    """`; did you mean 'profile.json'?` where a file of nearly this name, and of its kind, is in the same folder."""
    try:
        names = [one.name for one in path.parent.iterdir() if one.suffix == path.suffix and one.is_file()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near and near[0] != path.name else ""
