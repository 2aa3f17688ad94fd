"""Bars for the stages of a plan: the shares of the pace spent computing and communicating, and of the memory."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from pipeplan.evaluate import Evaluation

MOST_STAGES = 16
BAR = 10
"""Columns of a bar for 100%."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def stages(score: Evaluation, copies: int, limited: bool) -> Iterator[Table | str]:
    """A table with a row for each stage, or for the `MOST_STAGES` slowest ones, and a line on those left out.

    `copies` is the number of copies of the pipeline. With `limited`, the table has a column for memory.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("stage", justify="right")
    for heading in ("compute", "sync", "to next", *(["memory"] if limited else [])):
        table.add_column(heading, no_wrap=True)
    shown = sorted(range(len(score.stages)), key=lambda index: -score.stages[index].stage_s)[:MOST_STAGES]
    for index in sorted(shown):
        costs = score.stages[index]
        parts = [(costs.compute_s, "cyan"), (costs.synchronisation_s, "yellow")]
        if index + 1 < len(score.stages):
            parts.append((costs.boundary_s, "blue"))
        cells = [bar(seconds / copies / score.pace_s, colour) for seconds, colour in parts]
        cells += [Text()] * (3 - len(cells))
        if limited:
            share = costs.memory_bytes / costs.capacity_bytes
            cells.append(bar(share, "red" if share > 1 else "green"))
        table.add_row(str(index + 1), *cells)
    yield table
    if len(score.stages) > len(shown):
        yield f"Of {len(score.stages)} stages those that take longest."


def bar(share: float, colour: str) -> Text:
    """A bar of up to `BAR` columns, to an eighth of a column, followed by the share in percent."""
    if share <= 0:
        return Text(" " * BAR + "   0%", "dim")
    eighths = max(1, round(min(share, 1.0) * BAR * 8))
    drawn = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return Text.assemble((drawn.ljust(BAR), colour), f" {share:>4.0%}")
