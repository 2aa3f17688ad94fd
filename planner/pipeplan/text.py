"""Text from files, cleaned for printing."""

from __future__ import annotations


def one_line(value: object) -> str:
    """Replace line breaks and control characters by spaces, for a line of output or a comment in a script."""
    return "".join(character if character.isprintable() else " " for character in str(value))
