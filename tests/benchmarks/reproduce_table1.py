"""Table 1 of the PipeDream paper: the published speed-ups beside pipeplan's predictions.

    python tests/benchmarks/reproduce_table1.py [--reference FOLDER] [--rows NAME,…] [--update-page]

FOLDER (or the environment variable PIPEPLAN_REFERENCE) holds PipeDream's published profiles, `pipedream/vgg16.txt` and
so on; estimated profiles take the place of those that are missing. docs/evidence/table1.md explains the table.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import table1_links
from table1_links import FITTED, SOURCE
from table1_rows import OFF, Row, Table, build_table, rows_named

from pipeplan.errors import InputError
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings

COLUMNS = (
    "publ., pred.: the published and the predicted speed-up; the second pred. is that of our plan. proof: ≤ says how"
    " much faster another plan can be at most, where shared cards cost something, which neither solver models."
)
RANK = (
    "rank: the rank of the paper's configuration among all lists of replica counts, each with its best cuts on"
    " consecutive workers, and copies inside each server; without shared cards, and without the passes that wait for an"
    " update, as those of data parallelism do in pred."
)


def to_markdown(table: Table) -> str:
    """The whole table as Markdown."""
    return "\n\n".join([*_rows(table), *_links(table)]) + "\n"


def _rows(table: Table) -> list[str]:
    cells = []
    for row in table.rows:
        published = row.published
        cells.append(
            (
                published.name,
                published.cluster,
                _config(row),
                f"{published.speedup:.2f}",
                f"{row.paper.gain:.2f}",
                f"{row.error:+.0%}" + ("*" if row.off else ""),
                f"{row.rank.place:,}",
                row.ours.config,
                f"{row.ours.gain:.2f}",
                _proof(row.outcome),
            )
        )
    estimated = [row.published.name for row in table.rows if not row.source.published]
    sizes = {f"{row.published.profile} {row.source.text}" for row in table.rows if row.source.published}
    below = (
        f"Starred rows are off by more than {OFF:.0%}; docs/evidence/table1.md gives the reasons.",
        "The rows of VGG-16 are fitted, not predicted." if _has_fitted(table.rows) else "",
        COLUMNS,
        f"{RANK} {_among(table.rows)}",
        f"Profiles published by PipeDream's authors: {'; '.join(sorted(sizes))}." if sizes else "",
        f"Rows with estimated profiles: {', '.join(estimated)}." if estimated else "",
        _times(table.rows),
        _to_accuracy(table.rows),
    )
    return [
        "### Table 1: times faster than data parallelism",
        _wrapped(SOURCE + "."),
        _lines("row|on|paper's|publ.>|pred.>|off>|rank>|ours|pred.>|proof", cells),
        *(_wrapped(text) for text in below if text),
    ]


def _has_fitted(rows: Sequence[Row]) -> bool:
    return any(row.published.name in FITTED.values() for row in rows)


def _among(rows: Sequence[Row]) -> str:
    totals = {row.published.shape: row.rank.among for row in rows}
    return f"There are {', '.join(f'{total:,} on {shape}' for shape, total in totals.items())}."


def _config(row: Row) -> str:
    stages = len(row.paper.plan.stages)
    straight = row.published.config == "straight" and stages != row.published.workers
    return f"straight {stages}" if straight else row.published.config


def _proof(outcome: Outcome) -> str:
    if outcome.verdict.proven and outcome.gap <= 1e-6:
        return "proven"
    return f"≤{outcome.gap:.1%}"


def _times(rows: Sequence[Row]) -> str:
    parts = [
        f"{row.published.name} "
        + ", ".join(f"{one.step_time_s * 1e3:.1f}" for one in (row.data_parallel, row.paper, row.ours))
        for row in rows
    ]
    return f"Milliseconds per minibatch (data parallelism, the paper's plan, ours): {'; '.join(parts)}."


def _to_accuracy(rows: Sequence[Row]) -> str:
    parts = [f"{row.published.name} {row.published.to_accuracy:g}" for row in rows if row.published.to_accuracy]
    return f"Time to accuracy, from the paper and not predicted: {', '.join(parts)}." if parts else ""


def _links(table: Table) -> list[str]:
    sources = list(dict.fromkeys(one.source for one in table.efficiencies))
    cells = [
        (
            *(one.cluster, one.level, one.operation),
            *(f"{one.nominal / 1e9:.4g}", f"{one.rate / 1e9:.3f}", f"{one.share:.3f}"),
            *(one.how, f"[{sources.index(one.source) + 1}]"),
        )
        for one in table.efficiencies
    ]
    return [
        "### Links: nominal and reached rate, GB/s each way",
        _lines("on|level|operation|nominal>|reached>|share>|how|from", cells),
        *(_wrapped(f"[{number}] {source}.") for number, source in enumerate(sources, start=1)),
        "All profiles are of a V100; the speed of cluster C's cards is the ratio of their peak to a V100's.",
    ]


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def _lines(header: str, cells: Sequence[Sequence[str]]) -> str:
    """A table. Columns that end in `>` are aligned to the right."""
    columns = header.split("|")
    rules = ["---:" if column.endswith(">") else "---" for column in columns]
    rows = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in cells]
    names = [column.removesuffix(">") for column in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, rules, *rows))


REFERENCE = "PIPEPLAN_REFERENCE"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "table1.md"
BLOCK = re.compile(r"<!-- table1 -->\n(.*?)<!-- /table1 -->", re.DOTALL)


def main() -> None:
    """Print the table."""
    named = os.environ.get(REFERENCE)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=Path(named) if named else None)
    parser.add_argument("--rows", metavar="NAME,…", help="only these rows: vgg16-4x4,gnmt8-3x4")
    parser.add_argument("--solver", choices=("dp", "both"), default="both")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for each solver and row")
    parser.add_argument("--update-page", action="store_true", help=f"write the table into {PAGE.name}")
    given = parser.parse_args()
    settings = Settings(simulate=False, solver=given.solver, time_limit_s=given.time_limit)
    try:
        wanted, folder = rows_named(given.rows), table1_links.folder_of(given.reference)
        table = build_table(wanted, folder, settings, lambda step: print(step, file=sys.stderr, flush=True))
    except InputError as error:
        sys.exit(f"error: {error}")
    text = to_markdown(table)
    print(text)
    if given.update_page:
        block = f"<!-- table1 -->\n\n{text.strip()}\n\n<!-- /table1 -->"
        PAGE.write_text(BLOCK.sub(lambda _: block, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
