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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import table1_links
from table1_configurations import TOLERANCE, Configurations, Rank
from table1_links import (
    FITTED,
    ROWS,
    SOURCE,
    Efficiency,
    ProfileSource,
    PublishedRow,
    cluster_of,
    fit_efficiencies,
    profile_of,
    row_named,
    stated,
)

from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.stage_times import plain_data_parallel
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util.text import did_you_mean

OFF = 0.25
"""Relative error from which on docs/evidence/table1.md gives a reason."""
MOST_CUTS = 50_000
FEWER = 2
"""Workers that a straight pipeline may leave idle, as PipeDream's do."""


@dataclass(frozen=True)
class Predicted:
    """A plan, its cost, and its predicted speed-up over data parallelism."""

    plan: Plan
    score: Evaluation
    gain: float

    @property
    def config(self) -> str:
        """Replicas of every stage."""
        return self.plan.config

    @property
    def step_time_s(self) -> float:
        """Seconds per minibatch."""
        return self.score.step_time_s


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    published: PublishedRow
    source: ProfileSource
    data_parallel: Predicted
    paper: Predicted
    rank: Rank
    ours: Predicted
    outcome: Outcome
    """The solved problem of `ours`, with its proof."""

    @property
    def error(self) -> float:
        """Predicted over published speed-up of the paper's configuration, less 1."""
        return self.paper.gain / self.published.speedup - 1

    @property
    def off(self) -> bool:
        """Whether the error is above `OFF`."""
        return abs(self.error) > OFF


class Case:
    """A row with a profile, for predictions with different link efficiencies. Cuts are computed once."""

    def __init__(self, row: PublishedRow, profile: Profile) -> None:
        self.row, self.profile = row, profile

    def problem(self, efficiencies: Sequence[Efficiency]) -> Problem:
        """Training with weight stashing and shared network cards, without a limit on memory."""
        return Problem(self.profile, cluster_of(self.row, efficiencies), Options(memory=False))

    @cached_property
    def cuts(self) -> Cuts:
        """The cuts of the profile."""
        return enumerate_cuts(self.problem(stated()), MOST_CUTS)

    @cached_property
    def _configurations(self) -> Configurations:
        return Configurations.of(self.problem(stated()), self.cuts)

    def configurations(self, efficiencies: Sequence[Efficiency]) -> Configurations:
        """All configurations on links with these efficiencies."""
        return Configurations(self.problem(efficiencies), self._configurations.cuts, within=self._configurations.within)

    def gain(self, efficiencies: Sequence[Efficiency]) -> float:
        """Speed-up of the paper's configuration, with its best cuts, over data parallelism."""
        configurations = self.configurations(efficiencies)
        _, score = paper_plan(self.row, configurations)
        problem = configurations.problem
        return evaluate(plain_data_parallel(problem, self.row.workers), problem).step_time_s / score.step_time_s


def paper_plan(row: PublishedRow, configurations: Configurations) -> tuple[Plan, Evaluation]:
    """The paper's configuration with its best cuts.

    A straight pipeline may leave workers idle, as PipeDream's do (GNMT-8 has 10 stages on 12 workers, GNMT-16 has 14
    on 16). The fastest number of stages is taken, and among equals the largest.
    """
    if row.config != "straight":
        return configurations.best(row.replicas)
    most = min(row.workers, configurations.most_stages)
    step_times = {
        stages: configurations.first((1,) * stages)[1].step_time_s for stages in range(max(1, most - FEWER), most + 1)
    }
    least = min(step_times.values())
    stages = max(count for count, step_time in step_times.items() if step_time <= least * (1 + TOLERANCE))
    return configurations.best((1,) * stages)


def predict_row(
    row: PublishedRow,
    source: ProfileSource,
    efficiencies: Sequence[Efficiency],
    settings: Settings,
    report: Callable[[str], None] = lambda step: None,
) -> Row:
    """Predict all plans of a row. `report` receives a few words about each step."""
    configurations = Case(row, source.profile).configurations(efficiencies)
    free = configurations.problem
    parallel = plain_data_parallel(free, row.workers)
    parallel_score = evaluate(parallel, free)

    def scored(plan: Plan, score: Evaluation) -> Predicted:
        return Predicted(plan, score, parallel_score.step_time_s / score.step_time_s)

    report(f"{row.name}: the paper's configuration")
    paper = scored(*paper_plan(row, configurations))
    report(f"{row.name}: its rank")
    rank = configurations.rank(paper.score.alone_s)
    report(f"{row.name}: our plan")
    outcome = solve(replace(free, options=replace(free.options, memory=True)), settings)
    ours = scored(outcome.plan, outcome.evaluation)
    return Row(row, source, scored(parallel, parallel_score), paper, rank, ours, outcome)


# The whole table: link efficiencies and rows.

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
    sources = {row.name: profile_of(row, folder) for row in (*fitted.values(), *wanted)}
    cases = {row.name: Case(row, sources[row.name].profile) for row in fitted.values()}
    report("the links")
    efficiencies = fit_efficiencies(fitted, lambda row, shares: cases[row.name].gain(shares))
    rows = [predict_row(row, sources[row.name], efficiencies, settings, report) for row in wanted]
    return Table(efficiencies, tuple(rows))


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
    parser.add_argument("--update-page", action="store_true", help=f"write the table into {PAGE.name}")
    given = parser.parse_args()
    settings = Settings(simulate=False, time_limit_s=20.0)
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
