"""A console on which names from files cannot move the cursor, change colours or turn the order of text around."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pipeplan.util.text import printable


class SafeConsole(Console):
    """Replaces control characters and bidirectional overrides in everything that is printed on it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable, with printable text."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style, segment.control)
