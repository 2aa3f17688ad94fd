"""The folders of bundled data, which lie inside the installed package or at the top of a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder of bundled data called `name` (`profiles` or `templates`)."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent.parent / name
