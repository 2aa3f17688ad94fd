"""Transcripts of the gallery's page: the commands in them, and whether what they print is what the page shows.

An ellipsis on a line by itself stands for lines that the page leaves out. What comes of an estimated profile is the
same everywhere, and is compared as it stands. What was measured is compared without its figures, and without what
follows from them: which layers a stage has, what binds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from repository import ROOT

GALLERY = ROOT / "docs" / "gallery"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
TIMES = re.compile(r"\bDP [\d.]+ s|\(HiGHS\) [\d.]+ s")
"""What the solvers took."""
ROW = re.compile(r"^(\S+ {2,}\S.*?) +(?:[\d.]+ +){5}([\d.]+) +([\d.]+) +[\d.]+ +[\d.]+$")
"""A layer of a measured profile: name and operation, five figures of time, then sizes: output, weights, kept, work."""
DEPENDS = re.compile(r"^( *\d| +stage \d|Note:|note:|sum | +best uniform grid)")
"""Lines that another machine has in another number, or with other words."""
AFTER = (
    "bound by ",
    "measured on ",
    "first cause: ",
    "microbatch 32, on ",
    "microbatch 4, on ",
    "run folder",
)
"""What a line has behind these depends on the machine."""


def sections() -> dict[str, str]:
    """The section of each job of the gallery, by the name of the job's file."""
    _, *found = re.split(r"^## ", (GALLERY / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text for text in found for name in re.findall(r"\]\((\w+)\.py\)", text)[:1]}


def transcripts(section: str) -> Iterator[tuple[str, list[str]]]:
    """(command, lines shown below it)."""
    for block in BLOCK.findall(section):
        for one in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = one.splitlines()
            yield command, lines


def missing(shown: list[str], printed: str, *, exact: bool) -> str | None:
    """The first line of a page that does not come in its place in what was printed; None if all do."""
    form: Callable[[str], str | None] = _exact if exact else shape
    rest = iter([form(line) for line in printed.splitlines()])
    for line in shown:
        wanted = form(line)
        if line != "…" and wanted is not None and wanted not in rest:
            return line
    return None


def _exact(line: str) -> str:
    return TIMES.sub("time", line.rstrip())


def shape(line: str) -> str | None:
    """A line without what depends on the machine; None for one that does as a whole."""
    if DEPENDS.search(line):
        return None
    if found := ROW.match(line):
        line = " ".join(found.groups())
        return re.sub(r"\s+", " ", line)
    for words in AFTER:
        line = line.partition(words)[0]
    line = re.sub(r"\d[\d.]*(-\d+)*( (ms|µs|s)\b)?", "#", line)
    return re.sub(r"[\s─]+", " ", line).strip()
