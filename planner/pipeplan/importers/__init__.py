"""Readers of other projects' files: PipeDream's profiles, and measurements of nccl-tests.

`recognise_format` tells them apart by their content.
"""

from __future__ import annotations

from pathlib import Path

from pipeplan.errors import InputError
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
