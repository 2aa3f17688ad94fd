"""The templates that travel with pipeplan, and users' own."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

import jinja2

from pipeplan import resources
from pipeplan.text import one_line

FILTERS: Mapping[str, Callable[[object], str]] = {
    "shell_quote": lambda value: shlex.quote(str(value)),
    "one_line": lambda value: " ".join(one_line(value).split()),
}
"""`shell_quote` for every value that a shell reads, `one_line` for comments."""


def template(name: str) -> jinja2.Template:
    """A template of the bundled folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.folder("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters |= FILTERS
    return environment.get_template(name)
