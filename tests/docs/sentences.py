"""Prints random sentences of the pages, the help, messages and docstrings: `sentences.py [--count 60] [--seed 1]`.

Two readers who did not write them mark each sentence that they had to read twice. The aim is at most 2 of 60.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHORTEST = 5
"""Words of the shortest sentence that is worth reading."""
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*])")
_NO_PROSE = re.compile(
    r"(?s:```.*?```|<!-- (\w+) -->.*?<!-- /\1 -->|<!--.*?-->)|^(?:\||#| {4})[^\n]*$|^\s*(?:[-*]|\d+\.) ", re.MULTILINE
)


def of_pages() -> Iterator[tuple[str, str]]:
    """(place, sentence) for the prose of every page that a person wrote, without the tables that a script writes."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        if "reference" not in page.parts:
            text = _NO_PROSE.sub("\n\n", page.read_text(encoding="utf-8"))
            for paragraph in re.split(r"\n\s*\n", text):
                yield from _sentences(str(page.relative_to(ROOT)), paragraph)


def of_code() -> Iterator[tuple[str, str]]:
    """(place, sentence) for docstrings, and for the text of help and messages."""
    for path in sorted([*(ROOT / "planner").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for paragraph in re.split(r"\n\s*\n", node.value):
                    yield from _sentences(f"{path.relative_to(ROOT)}:{node.lineno}", paragraph)


def _sentences(place: str, paragraph: str) -> Iterator[tuple[str, str]]:
    for sentence in _END.split(" ".join(paragraph.split())):
        if len(sentence.split()) >= SHORTEST and sentence[:1].isupper() and sentence.endswith((".", "?")):
            yield place, sentence


def main() -> None:
    """Print the sentences, half of them from the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    chosen = rng.sample(list(of_pages()), options.count // 2)
    chosen += rng.sample(list(of_code()), options.count - len(chosen))
    for number, (place, sentence) in enumerate(chosen, 1):
        print(f"{number:3}  {sentence}\n     {place}")


if __name__ == "__main__":
    main()
