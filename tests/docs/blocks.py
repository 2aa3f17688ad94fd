"""The blocks of commands and of Python in the documents, and what is said of each where only its source shows it.

A comment directly above a block says how it is tested:

    <!-- not run: needs SLURM -->        why it cannot be run in a test
    <!-- ci: path -->                    .ci/run runs it
    <!-- run in: docs/tutorial.md -->    each of its commands is run in that document
    <!-- run by: tests/gallery/test_x.py -->    that test runs it
    <!-- slow: two trainings -->        run by `pytest -m slow` only
    <!-- before: pipeplan solve … -->    what else must have been done before; run with it. Repeat
    <!-- but not: pipeplan sweep (minutes) -->    the commands that begin so are not run, and why
    <!-- folder: empty -->               what is there before: FOLDERS in test_commands.py; "goes on": what the block
                                         before left. By default all of it: a model, its profile, a plan and a run
    <!-- fails: 2 -->                    what it shows is a mistake, and this its exit code

A block with none of the first four is run. Above a block that is no command:

    <!-- file: lab.toml -->              the commands below it find it as a file of that name
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("bash", "console", "sh", "shell")
KINDS = ("not run", "ci", "run in", "run by", "slow", "before", "but not", "folder", "fails")
MARK = re.compile(r"<!-- ([a-z ]+): (.*?) -->")
FENCE = re.compile(r"^( *)```+ *([\w.+-]*)[^\n]*\n(.*?)^\1```+ *$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^|(?<=\n\n)) {4}(?! )[^\n]*\n(?:(?: {4}[^\n]*)?\n)*", re.MULTILINE)
BEGINS = re.compile(
    r"(?:[A-Z_]+=\S* )*(?:\$ )?(?:pipeplan|\.{0,2}/\S+|\.venv/\S+|python3?|pip|torchrun|mpirun|srun|sbatch|scontrol|"
    r"kubectl|ssh|scp|rsync|bash|for|export|source|mkdocs|git|apt-get|sudo|docker|nice|cd|cat|mkdir|rm)(?:\s|$)"
)


@dataclass(frozen=True)
class Block:
    """A block of a document: where it stands, in which language, its text, and the marks above it."""

    page: str
    line: int
    language: str
    text: str
    marks: tuple[tuple[str, str], ...]

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def marked(self, kind: str) -> list[str]:
        return [text for name, text in self.marks if name == kind]

    @property
    def runs(self) -> bool:
        return not any(self.marked(kind) for kind in ("not run", "ci", "run in", "run by"))

    def left_out(self, command: str) -> bool:
        """Whether a `but not` is about this command."""
        return any(command.startswith(text.partition(" (")[0]) for text in self.marked("but not"))

    @property
    def commands(self) -> list[str]:
        """Each command with the lines that it goes on in; of a transcript without what was printed."""
        lines = self.text.splitlines()
        if self.language == "console":
            lines = [*_typed(lines)]
        return [*_whole(lines)]


def _typed(lines: list[str]) -> Iterator[str]:
    going_on = False
    for line in lines:
        if line.startswith("$ ") or going_on:
            yield line.removeprefix("$ ") if line.startswith("$ ") else line.removeprefix("> ")
            going_on = line.endswith(("\\", "&&", "|"))


def _whole(lines: list[str]) -> Iterator[str]:
    """Commands that end in a backslash, `&&` or `|`, or begin a loop, go on in the next line."""
    command = ""
    for line in lines:
        if not line.strip() or (line.startswith("#") and not command):
            continue
        command += line + "\n"
        if not line.rstrip().endswith(("\\", "&&", "|")):
            yield command.strip()
            command = ""
    if command.strip():
        yield command.strip()


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """All blocks of a document in order, those that are indented too where they look like commands."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    found = []
    for match in FENCE.finditer(text):
        inside = "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines())
        language = match[2]
        if language in ("", "text") and inside.startswith("$ "):
            language = "console"
        found.append((match.start(), language, inside))
    # Blank lines in place of what is fenced keep the places of the rest.
    rest = FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for match in INDENTED.finditer(rest):
        inside = "\n".join(line[4:] for line in match[0].splitlines()).strip("\n")
        if any(BEGINS.match(line) for line in inside.splitlines()):
            found.append((match.start(), "console" if inside.startswith("$ ") else "bash", inside))
    return [
        Block(name, text.count("\n", 0, start) + 1, language, inside, _marks(text[:start]))
        for start, language, inside in sorted(found)
    ]


def _marks(above: str) -> tuple[tuple[str, str], ...]:
    marks: list[tuple[str, str]] = []
    while (found := re.search(r"<!-- ([a-z ]+): (.*?) -->\s*\Z", above)) is not None:
        marks.insert(0, (found[1], found[2]))
        above = above[: found.start()]
    return tuple(marks)


def shell_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in SHELL]


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]
