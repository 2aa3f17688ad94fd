"""What pipeplan_launch tells a user who gave it something it cannot use."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LaunchError(Exception):
    """One line for the user: what is wrong, where, and what to do. Only a command line prints it, and exits with 2."""


class PeerLost(LaunchError):
    """Another worker is gone, frozen or cut off: a fault, after which all workers may start again."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'?` for near misses, else the list of what there is."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(repr(match) for match in near)}?"
    return f"there are: {', '.join(names)}" if names else "there are none"
