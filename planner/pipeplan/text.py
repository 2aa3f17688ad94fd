"""Text from files, made fit to be shown."""

from __future__ import annotations


def one_line(value: object) -> str:
    """Text without line breaks or control characters: for a line of output, or a comment in a script."""
    return "".join(character if character.isprintable() else " " for character in str(value))
