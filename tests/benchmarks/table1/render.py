"""The sections on a terminal and as Markdown."""

from __future__ import annotations

from typing import Literal

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from table1.sections import Section


def print_sections(sections: list[Section], console: Console) -> None:
    """Print all sections."""
    for number, section in enumerate(sections):
        if number:
            console.print()
        console.print(Text(section.title, style="bold"))
        for line in section.before:
            console.print(Text(line))
        if section.columns:
            console.print(_grid(section))
        for line in section.after:
            console.print(Text(line))


def _grid(section: Section) -> Grid:
    grid = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in section.columns:
        justify: Literal["left", "right"] = "right" if column.endswith(">") else "left"
        grid.add_column(column.removesuffix(">"), justify=justify, no_wrap=True)
    for row in section.cells:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


def to_markdown(sections: list[Section]) -> str:
    """All sections as Markdown."""
    parts = []
    for section in sections:
        parts.append(f"## {section.title}")
        parts += section.before
        if section.columns:
            parts.append("\n".join(_lines(section)))
        parts += section.after
    return "\n\n".join(parts) + "\n"


def _lines(section: Section) -> list[str]:
    names = [column.removesuffix(">") for column in section.columns]
    rules = ["---:" if column.endswith(">") else "---" for column in section.columns]
    rows = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in section.cells]
    return [f"| {' | '.join(row)} |" for row in (names, rules, *rows)]
