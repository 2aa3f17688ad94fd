"""The whole table: link efficiencies and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.planning.settings import Settings
from pipeplan.util.text import did_you_mean
from table1 import profiles
from table1.efficiencies import Efficiency, fit_efficiencies
from table1.published import FITTED, ROWS, PublishedRow, row_named
from table1.rows import Case, Row, predict_row

Report = Callable[[str], None]
"""Receives a few words about the step that begins."""


@dataclass(frozen=True)
class Table:
    """All results that the benchmark prints."""

    efficiencies: tuple[Efficiency, ...]
    rows: tuple[Row, ...]


def rows_named(names: str | None) -> tuple[PublishedRow, ...]:
    """The rows of a comma-separated list, in the paper's order; all rows for None.

    Raises `InputError` where there is no row of a name.
    """
    if names is None:
        return ROWS
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if row_named(name) is None:
            raise InputError(f"--rows: there is no row {name!r}; {did_you_mean(name, [row.name for row in ROWS])}")
    return tuple(row for row in ROWS if row.name in wanted)


def build_table(wanted: Sequence[PublishedRow], folder: Path | None, settings: Settings, report: Report) -> Table:
    """Predict the rows. The links are always fitted on the VGG-16 rows, wanted or not."""
    fitted = {cluster: row for cluster, name in FITTED.items() if (row := row_named(name)) is not None}
    sources = {row.name: profiles.profile_of(row, folder) for row in (*fitted.values(), *wanted)}
    cases = {row.name: Case(row, sources[row.name].profile) for row in fitted.values()}
    report("the links")
    efficiencies = fit_efficiencies(fitted, lambda row, shares: cases[row.name].gain(shares))
    rows = [predict_row(row, sources[row.name], efficiencies, settings, report) for row in wanted]
    return Table(efficiencies, tuple(rows))
