"""One row of the table: predictions for the paper's configuration and for pipeplan's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from table1_configurations import TOLERANCE, Configurations, Rank
from table1_links import (
    FITTED,
    ROWS,
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
