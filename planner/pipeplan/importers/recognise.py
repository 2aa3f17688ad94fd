"""Recognises a file's format by its content, and completes an imported profile: minibatch size and provenance."""

from __future__ import annotations

from pathlib import Path

from pipeplan._version import __version__
from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Provenance
from pipeplan.profile_data.profile import LARGEST_MINIBATCH
from pipeplan.profile_data.profile_document import PROFILE_FORMAT
from pipeplan.util.files import read_json, read_text

PIPEDREAM, NCCL_TESTS = "pipedream", "nccl-tests"
FORMATS = (PIPEDREAM, NCCL_TESTS)


def recognise_format(path: Path) -> str:
    """The format of a file, one of `FORMATS`. Raises `InputError` for any other file."""
    text = read_text(path)
    if text.lstrip().startswith(("{", "[")):
        fields = read_json(path, "file of links").value
        if isinstance(fields, dict):
            if fields.get("format") == PROFILE_FORMAT:
                raise InputError(f"{path} is a profile of pipeplan already: there is nothing to import")
            if "results" in fields and ("config" in fields or "nccl_version" in fields):
                return NCCL_TESTS
    elif "compute_time=" in text or text.startswith("\t"):
        return PIPEDREAM
    raise InputError(f"{path} is in none of the readable formats ({', '.join(FORMATS)}): if it is, give --format")


def checked_minibatch(minibatch: int | None, path: Path) -> int:
    """The minibatch size that the user gave for a file whose format does not state it.

    Raises `InputError` where it is missing or out of range.
    """
    if minibatch is None:
        raise InputError(
            f"{path} does not say how many samples its times are for: give --microbatch, as in --microbatch 64"
        )
    if not 1 <= minibatch <= LARGEST_MINIBATCH:
        raise InputError(f"--microbatch must be at least 1 and at most {LARGEST_MINIBATCH}, not {minibatch}")
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
