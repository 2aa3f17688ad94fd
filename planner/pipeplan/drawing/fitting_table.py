"""A table that leaves out columns where a terminal is too narrow for all, instead of cutting figures short."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text


class FittingTable(Table):
    """A table of which the columns with the headings `expendable` may be left out, the first one first."""

    def __init__(self, *, expendable: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self.expendable = tuple(expendable)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, and below it a line that names the columns that were left out."""
        shown, left_out = copy.copy(self), []
        unlimited = options.update(max_width=10_000)
        for heading in self.expendable:
            if Table.__rich_measure__(shown, console, unlimited).maximum <= options.max_width:
                break
            kept = [column for column in shown.columns if column.header != heading]
            if len(kept) < len(shown.columns):
                shown.columns = kept
                left_out.append(" ".join(str(heading).replace("-\n", "").split()))
        yield from Table.__rich_console__(shown, console, options)
        if left_out:
            yield Text(f"Not shown in {options.max_width} columns: {', '.join(left_out)}.", "dim")
