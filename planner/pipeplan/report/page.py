"""The page: a single HTML file that contains its styles, its scripts and the document, and needs no network."""

from __future__ import annotations

import json
from typing import Any

from pipeplan.rendering import templates
from pipeplan.util import files

# Characters that could end the script element around the document, or begin another. JSON parsers read the escapes
# as the same characters.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def embedded(document: dict[str, Any]) -> str:
    """The document as JSON that is safe inside a script element."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def page(document: dict[str, Any]) -> str:
    """The text of the HTML file."""
    folder = files.bundled_folder("templates") / "report"
    parts = {
        kind: "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"*.{kind}")))
        for kind in ("css", "js")
    }
    return templates.load_template("report.html.j2").render(
        title=document["title"], document=embedded(document), **parts
    )
