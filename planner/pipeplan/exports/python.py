"""Literals in generated Python."""

from __future__ import annotations

WIDTH = 88
"""Default line width of Python formatters."""


def literal(value: object) -> str:
    """A Python expression for a string, a number or a list of these, in the style of formatters."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    text = repr(value)
    if not isinstance(value, str) or '"' in text:
        return text
    return f'"{text[1:-1]}"'


def fitted(values: list[int] | tuple[int, ...], indent: int = 4) -> str:
    """A list of numbers inside another list: on one line if it fits, else with one number on each line."""
    line = literal(values)
    if indent + len(line) + 1 <= WIDTH:
        return line
    inner = " " * (indent + 4)
    return "[\n" + "".join(f"{inner}{value},\n" for value in values) + " " * indent + "]"
