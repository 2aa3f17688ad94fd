"""Renders the bundled templates, and those of users."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from pipeplan.errors import InputError
from pipeplan.util import files
from pipeplan.util.files import read_text
from pipeplan.util.text import did_you_mean, one_line

FILTERS: Mapping[str, Callable[[object], str]] = {
    "shell_quote": lambda value: shlex.quote(str(value)),
    "one_line": lambda value: " ".join(one_line(value).split()),
}
"""Filters of all templates: `shell_quote` for every value that a shell reads, `one_line` for comments."""


def load_template(name: str) -> jinja2.Template:
    """Load a template of the bundled folder."""
    return _environment(jinja2.Environment, files.bundled_folder("templates")).get_template(name)


def render_user_template(path: Path, variables: Mapping[str, Any]) -> str:
    """Render a user's template. It can include files of its folder; it runs in a sandbox, and cannot run code.

    Raises `InputError`, which names the line of the template that is wrong.
    """
    read_text(path)  # for its error message if the file cannot be read
    try:
        return _environment(SandboxedEnvironment, path.parent).get_template(path.name).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"{error.filename or path}, line {error.lineno}: {_first_line(error)}") from error
    except jinja2.UndefinedError as error:
        missing = (error.message or "").removesuffix(" is undefined").strip("'")
        hint = f"; {did_you_mean(missing, sorted(variables))}" if missing.isidentifier() else ""
        raise InputError(f"{_place(error, path)}: {_first_line(error)}{hint}") from error
    except Exception as error:
        # Rendering can raise anything, such as the ValueError of a filter.
        raise InputError(f"{_place(error, path)}: {_first_line(error)}") from error


def _environment(kind: type[jinja2.Environment], folder: Path) -> jinja2.Environment:
    environment = kind(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters |= FILTERS
    return environment


def _place(error: Exception, path: Path) -> str:
    """File and line of the template, which jinja2 puts into the frames of its tracebacks."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.endswith(".py"):
            return f"{frame.filename}, line {frame.lineno}"
    return str(path)


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
