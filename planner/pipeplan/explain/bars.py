"""The stages of a plan as bars: what of the pace each of them needs for what, and what of the memory."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from pipeplan.evaluate import Evaluation

MOST_STAGES = 16
BAR = 10
"""Columns of a bar that stands for all of the pace, or of the memory."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def stages(score: Evaluation, copies: int, limited: bool) -> Iterator[Table | str]:
    """A row for each stage, or for those that need most of the pace, where there are very many. `copies` of the whole
    pipeline; `limited`: whether memory counts.
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
    """A bar of up to `BAR` columns, to an eighth of one, and the share in figures: read without colours, too."""
    if share <= 0:
        return Text(" " * BAR + "   0%", "dim")
    eighths = max(1, round(min(share, 1.0) * BAR * 8))
    drawn = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return Text.assemble((drawn.ljust(BAR), colour), f" {share:>4.0%}")
