"""Renders the bundled templates."""

from __future__ import annotations

import shlex

import jinja2

from pipeplan.util import files
from pipeplan.util.text import one_line


def load_template(name: str) -> jinja2.Template:
    """Load a template of the bundled folder.

    Templates apply the filter `shell_quote` to every value that a shell reads, and `one_line` to comments.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(files.bundled_folder("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters["shell_quote"] = lambda value: shlex.quote(str(value))
    environment.filters["one_line"] = lambda value: " ".join(one_line(value).split())
    return environment.get_template(name)
