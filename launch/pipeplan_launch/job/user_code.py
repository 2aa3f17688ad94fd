"""Errors of the user's own code: each becomes one line that quotes the place in their file. Torch-free."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeplan_launch.errors import LaunchError


@contextmanager
def user_code_errors(what: str) -> Iterator[None]:
    """Turn exceptions of the user's code inside into a `LaunchError`. `what` names the part of the job that runs, as
    in "the job's loss".
    """
    try:
        yield
    except LaunchError:
        raise
    except (Exception, SystemExit) as error:  # a job that ends its process would look like a fault
        raise LaunchError(f"{what} failed: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """`Type: message (file:line: source line)` on one line, for the innermost frame of the user's own code."""
    message = " ".join(str(error).split()) or "no message"
    if isinstance(error, SyntaxError) and error.filename:
        line = (error.text or "").strip()
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno}: {line})"
    place = user_line(error)
    if isinstance(error, RecursionError):
        message += "; nest it less deeply, or raise sys.setrecursionlimit where it is made"
    return f"{type(error).__name__}: {message}{f' ({place})' if place else ''}"


def user_line(error: BaseException) -> str | None:
    """`file:line: source line` of the innermost frame of the user's own code, or None if no frame is the user's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else None


def is_user_code(filename: str) -> bool:
    """Whether a file is the user's: not torch's, not the standard library's, not this package's machinery."""
    path = Path(filename)
    if filename.startswith("<") or "site-packages" in path.parts or "dist-packages" in path.parts:
        return False
    package = _package_folder()
    if package in path.parents:
        return package / "models" in path.parents
    libraries = [Path(os.__file__).parent]
    torch = sys.modules.get("torch")  # a process without torch has no frames of it either
    if torch is not None and torch.__file__:
        libraries.append(Path(torch.__file__).parent)
    return not any(library in path.parents for library in libraries)


def _package_folder() -> Path:
    """The folder of pipeplan_launch."""
    package = sys.modules[__name__.partition(".")[0]]
    assert package.__file__ is not None
    return Path(package.__file__).parent
