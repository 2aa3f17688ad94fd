"""Python that is generated."""

from __future__ import annotations

WIDTH = 88
"""Columns that formatters fill unless they are told otherwise."""


def literal(value: object) -> str:
    """A Python expression for a text, a number or a list of such, whatever they contain, as formatters write it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    text = repr(value)
    if not isinstance(value, str) or '"' in text:
        return text
    return f'"{text[1:-1]}"'


def fitted(values: list[int] | tuple[int, ...], indent: int = 4) -> str:
    """A list of numbers as an item of another list, on one line where that has room, else on a line for each."""
    line = literal(values)
    if indent + len(line) + 1 <= WIDTH:
        return line
    inner = " " * (indent + 4)
    return "[\n" + "".join(f"{inner}{value},\n" for value in values) + " " * indent + "]"
