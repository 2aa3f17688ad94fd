"""Errors that the executor reports to the user.

LaunchError                an error in one line for the user; the run then ends with status 2
├── PeerLost               another worker is lost; all workers may be restarted
└── DamagedCheckpoint      a checkpoint has changed since it was written; an earlier one may be used instead
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress


class LaunchError(Exception):
    """One line for the user: the problem, its place and the remedy. Only a command line prints it, and exits with 2."""


class PeerLost(LaunchError):
    """Another worker has ended, hangs or cannot be reached. After this fault all workers may be restarted."""

    def __init__(self, line: str, peers: Sequence[int] = ()) -> None:
        """`peers`: ranks that this worker waited for, as far as they are known."""
        super().__init__(line)
        self.peers = tuple(peers)


class DamagedCheckpoint(LaunchError):
    """A file of a checkpoint is missing, cannot be read, or has changed since it was written."""


_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def terminal_line(text: object) -> str:
    """A line that cannot change a terminal: control characters and bidirectional overrides become replacement
    characters, and line breaks become spaces.
    """
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", " ".join(str(text).splitlines()))


def print_status(text: object) -> None:
    """Print a line on stderr and flush it. If nobody can read it any more, as after SIGHUP, it is dropped."""
    with suppress(OSError):
        print(terminal_line(text), file=sys.stderr, flush=True)


def listed(parts: Iterable[object]) -> str:
    """The parts as text: `a`, `a and b` or `a, b and c`."""
    texts = [str(part) for part in parts]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a wrong name: `did you mean 'a' or 'b'?` for near misses, else the list of known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(repr(match) for match in near)}?"
    return f"there are: {', '.join(names)}" if names else "there are none"
