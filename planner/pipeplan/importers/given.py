"""The minibatch size and the provenance of an imported profile."""

from __future__ import annotations

from pathlib import Path

from pipeplan._version import __version__
from pipeplan.errors import InputError
from pipeplan.profile_data import LARGEST_MINIBATCH
from pipeplan.profile_layers import Provenance


def checked_minibatch(minibatch: int | None, path: Path) -> int:
    """The minibatch size that the user gave for a file whose format does not state it.

    Raises `InputError` where it is missing or out of range.
    """
    if minibatch is None:
        raise InputError(
            f"{path} does not say how many samples its times are for: give --minibatch, as in --minibatch 64"
        )
    if not 1 <= minibatch <= LARGEST_MINIBATCH:
        raise InputError(f"--minibatch must be at least 1 and at most {LARGEST_MINIBATCH}, not {minibatch}")
    return minibatch


def imported_provenance(path: Path, tool: str, device_name: str, notes: list[str]) -> Provenance:
    """The provenance of a profile that was imported from a file of another tool; the notes list all assumptions."""
    return Provenance(
        kind="imported",
        device_name=device_name,
        how=f"imported from {path.name}, {tool}",
        pipeplan=__version__,
        notes=tuple(notes),
    )
