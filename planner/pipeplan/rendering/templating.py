"""The templates that travel with pipeplan, and users' own."""

from __future__ import annotations

import shlex

import jinja2

from pipeplan import resources


def template(name: str) -> jinja2.Template:
    """A template of the bundled folder, with the filter `shell_quote` for every value that a shell reads."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.folder("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters["shell_quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(name)
