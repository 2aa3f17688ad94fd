"""Checks whether an installed torch is one that the executor can use, mostly without importing it. Torch-free."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path

OLDEST = (2, 8)
"""The oldest torch that the executor supports, as in pyproject.toml."""


def version_problem() -> tuple[str, str] | None:
    """(problem, remedy) where torch is missing or too old, without importing it; None where it is neither."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # torch is imported, but as a module without a spec
        return None
    if spec is None:
        return "torch is not installed", "pip install 'pipeplan[torch]'"
    version = _version(spec.origin)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        oldest = ".".join(str(number) for number in OLDEST)
        return f"torch {version} is too old, {oldest} is the oldest supported version", f"pip install 'torch>={oldest}'"
    return None


def import_problem() -> tuple[str, str] | None:
    """(problem, remedy) where torch is missing, too old or cannot be imported; None where it is usable.

    Imports torch, since a library that it needs may be missing.
    """
    if problem := version_problem():
        return problem
    try:
        importlib.import_module("torch.distributed")
    except Exception as error:  # importing a broken installation may raise anything
        spec = importlib.util.find_spec("torch")
        place = f" ({spec.origin})" if spec is not None and spec.origin is not None else ""
        message = " ".join(str(error).split()) or type(error).__name__
        return f"torch cannot be imported{place}: {message}", "install it anew: pip install 'pipeplan[torch]'"
    return None


def _version(origin: str | None) -> str:
    """Version of the torch package at `origin`, which an import would find; pip's records may be of another one."""
    if origin is not None:
        try:
            text = (Path(origin).parent / "version.py").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            text = ""
        if version := re.search(r"^__version__\s*(?::.*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return version[1]
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
