"""The page: one HTML file with its styles, its scripts and the document inside, which needs no network."""

from __future__ import annotations

import json
from typing import Any

from pipeplan.rendering import templates
from pipeplan.util import files

# What could end the script element that the document stands in, or begin another; JSON reads the escapes alike.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def embedded(document: dict[str, Any]) -> str:
    """The document as JSON that can stand inside a script element."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def page(document: dict[str, Any]) -> str:
    """The whole file."""
    folder = files.bundled_folder("templates") / "report"
    parts = {
        kind: "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"*.{kind}")))
        for kind in ("css", "js")
    }
    return templates.load_template("report.html.j2").render(
        title=document["title"], document=embedded(document), **parts
    )
