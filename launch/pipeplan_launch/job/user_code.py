"""Errors of the user's code. Each becomes one line that quotes the place in the user's file. Torch-free."""

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
    """Context that turns exceptions of the user's code into `LaunchError`. `what` names the part of the job that runs,
    as in "the job's loss".
    """
    try:
        yield
    except LaunchError:
        raise
    except (Exception, SystemExit) as error:  # if a job ended its process, it would look like a fault
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
    """Whether a file is the user's, and not part of torch, the standard library or pipeplan."""
    path = Path(filename)
    if filename.startswith("<") or "site-packages" in path.parts or "dist-packages" in path.parts:
        return False
    package = _folder_of(__name__.partition(".")[0])
    if package is not None and package in path.parents:
        return package / "models" in path.parents
    # A process that has not imported torch or the planner has no frames of them.
    libraries = [Path(os.__file__).parent, _folder_of("torch"), _folder_of("pipeplan")]
    return not any(library in path.parents for library in libraries if library is not None)


def is_users_class(kind: type) -> bool:
    """Whether a class is defined in a file of the user's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_user_code(file)


def _folder_of(package: str) -> Path | None:
    """The folder of a package, if it was imported."""
    module = sys.modules.get(package)
    return None if module is None or module.__file__ is None else Path(module.__file__).parent
