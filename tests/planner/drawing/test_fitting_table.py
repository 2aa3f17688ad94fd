"""A table in a narrow terminal: whole columns are left out and named, and no cell is cut short."""

from __future__ import annotations

import io

import pytest
from rich import box
from rich.console import Console

from pipeplan.drawing.tables import FittingTable

ROWS = [("first", "123456", "7.89 ms", "44%"), ("second", "654321", "12.3 ms", "9%")]


def _printed(width: int) -> str:
    table = FittingTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, expendable=("time\nms", "bytes", "absent"))
    for heading in ("layer", "bytes", "time\nms", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in ROWS:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    half = len(text) // 2
    assert text[:half] == text[half:], "printing a table does not change it"
    return str(text[:half])


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (40, (0, 1, 2, 3), ""),
        (22, (0, 1, 3), "Not shown in 22 columns: time ms."),
        (16, (0, 3), "Not shown in 16 columns: time ms, bytes."),
    ],
)
def test_columns_are_dropped_in_their_order_and_named(width: int, shown: tuple[int, ...], left_out: str) -> None:
    text = _printed(width)
    for row in ROWS:
        for number, cell in enumerate(row):
            assert (cell in text) == (number in shown)
    assert "…" not in text
    assert left_out in " ".join(text.split())
    assert ("Not shown" in text) == bool(left_out)
