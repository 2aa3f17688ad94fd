"""The result of the self-test on this machine, for `--transport auto`.

The file is `$XDG_CACHE_HOME/pipeplan/selftest.json` (`~/.cache/pipeplan/selftest.json`). The key of a result holds
everything that the result depends on: the host, the builds of torch and NCCL, and the visible GPUs.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from pathlib import Path

import torch

from pipeplan_launch.devices.backend import backend_of, nccl_version
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import read_file, write_json
from pipeplan_launch.typed_document import decode, parse_json


def remembered_file() -> Path:
    """The file with the results of all machines that share this user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "pipeplan" / "selftest.json"


def machine_key() -> str:
    """The key of this machine's result: the conditions under which it holds."""
    cards = ",".join(backend_of("cuda").cards())
    return f"{platform.node()} torch {torch.__version__} NCCL {nccl_version()} GPUs {cards}"


def remember(transport: str) -> Path:
    """Record the mode that this machine should use; returns the file."""
    path = remembered_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, _all() | {machine_key(): transport})
    return path


def remembered_transport(modes: Collection[str]) -> str | None:
    """The mode that the self-test found for this machine, if it is one of `modes`; else None.

    An earlier version may have recorded a mode that no longer exists.
    """
    found = _all().get(machine_key())
    return found if found in modes else None


def _all() -> dict[str, str]:
    path = remembered_file()
    try:
        return decode(parse_json(read_file(path)), dict[str, str], str(path))
    except (OSError, ValueError, RecursionError, LaunchError):
        return {}
