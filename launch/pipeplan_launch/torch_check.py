"""Checks whether the executor can use the installed torch, mostly without importing it. Torch-free."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

TRACING = ("torch.distributed", "torch.export", "torch._dynamo", "torch.utils._sympy.interp")
"""The parts of torch that tracing needs. Importing them also finds missing libraries that they need."""
OLDEST = (2, 11)
"""The oldest torch that the executor supports, as in pyproject.toml."""


def version_problem() -> tuple[str, str] | None:
    """(problem, remedy) if torch is missing or too old, found without importing it; else None."""
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


def import_problem(parts: Sequence[str] = ("torch.distributed",)) -> tuple[str, str] | None:
    """(problem, remedy) if torch is missing, too old or cannot be imported; None if it is usable.

    It imports torch and these `parts` of torch, because a library that they need may be missing.
    """
    if problem := version_problem():
        return problem
    for name in ("torch", *parts):
        try:
            importlib.import_module(name)
        except Exception as error:  # importing a broken installation may raise anything
            spec = importlib.util.find_spec("torch")
            place = f" ({spec.origin})" if spec is not None and spec.origin is not None else ""
            message = " ".join(str(error).split()) or type(error).__name__
            what = "torch cannot be imported" if name == "torch" else f"torch is broken: {name} cannot be imported"
            return f"{what}{place}: {message}", "install it anew: pip install 'pipeplan[torch]'"
    return None


def _version(origin: str | None) -> str:
    """Version of the torch package at `origin`, where an import finds it. pip's records may describe another one."""
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
