"""One row of the table: the paper's configuration and ours, predicted alike, beside what was published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan.cuts import Cuts, enumerate_cuts
from pipeplan.evaluate import Evaluation, evaluate
from pipeplan.plan import Plan
from pipeplan.problem import Options, Problem
from pipeplan.profile_data import Profile
from pipeplan.reproduce.configurations import TOLERANCE, Configurations, Rank
from pipeplan.reproduce.efficiencies import Efficiency, cluster_of, stated
from pipeplan.reproduce.profiles import Source
from pipeplan.reproduce.published import Published
from pipeplan.solving import Outcome, Settings, solve
from pipeplan.stages import one_stage

OFF = 0.25
"""A prediction further from what was published than this needs a reason."""
MOST_CUTS = 50_000
PLANS = ("ours", "paper", "data parallel", "straight")
"""What of a row is replayed."""
FEWER = 2
"""Workers that a straight pipeline may leave idle, as PipeDream's own do."""


@dataclass(frozen=True)
class Predicted:
    """A plan, what it costs, and how many times faster than data parallelism it is."""

    plan: Plan
    score: Evaluation
    gain: float

    @property
    def config(self) -> str:
        """Replicas of every stage."""
        return self.plan.config

    @property
    def pace_s(self) -> float:
        """Seconds a minibatch."""
        return self.score.pace_s


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    published: Published
    source: Source
    parallel: Predicted
    paper: Predicted
    rank: Rank
    ours: Predicted
    straight: Predicted | None
    outcome: Outcome
    """How ours was found, with its proof."""

    @property
    def error(self) -> float:
        """The predicted gain of the paper's configuration over the published one, less 1."""
        return self.paper.gain / self.published.speedup - 1

    @property
    def off(self) -> bool:
        """Whether the prediction needs a reason for being wrong."""
        return abs(self.error) > OFF

    @property
    def plans(self) -> dict[str, Predicted]:
        """The plans that are replayed, by name."""
        found = zip(PLANS, (self.ours, self.paper, self.parallel, self.straight), strict=True)
        return {name: plan for name, plan in found if plan is not None}


class Case:
    """A row with a profile, to be predicted on links that vary: what does not depend on them is computed once."""

    def __init__(self, row: Published, profile: Profile) -> None:
        self.row, self.profile = row, profile

    def problem(self, known: Sequence[Efficiency]) -> Problem:
        """Training by stashing, synchronisation hidden behind compute, cards shared, no limit on memory."""
        return Problem(self.profile, cluster_of(self.row, known), Options(memory=False))

    @cached_property
    def cuts(self) -> Cuts:
        """Of the profile; they depend on nothing else."""
        return enumerate_cuts(self.problem(stated()), MOST_CUTS)

    @cached_property
    def _configurations(self) -> Configurations:
        return Configurations.of(self.problem(stated()), self.cuts)

    def configurations(self, known: Sequence[Efficiency]) -> Configurations:
        """All configurations on links with these shares."""
        return Configurations(self.problem(known), self._configurations.cuts, within=self._configurations.within)

    def gain(self, known: Sequence[Efficiency], *, hidden: bool = True) -> float:
        """What the paper's configuration gains over data parallelism, with its best cuts.

        With `hidden` false nothing of data parallelism's all-reduce hides behind its compute.
        """
        configurations = self.configurations(known)
        _, score = paper_plan(self.row, configurations)
        base = configurations.problem
        base = base if hidden else replace(base, options=replace(base.options, overlap=0.0))
        return evaluate(one_stage(base, self.row.workers), base).pace_s / score.pace_s


def paper_plan(row: Published, configurations: Configurations) -> tuple[Plan, Evaluation]:
    """The paper's configuration with its best cuts.

    A straight one may leave workers idle, as PipeDream's own do (GNMT-8 has 10 stages for 12 workers, GNMT-16 has 14
    for 16): the best of them, and among equals the one with the most stages.
    """
    if row.config != "straight":
        return configurations.best(row.replicas)
    most = min(row.workers, configurations.most_stages)
    paces = {stages: configurations.first((1,) * stages)[1].pace_s for stages in range(max(1, most - FEWER), most + 1)}
    least = min(paces.values())
    stages = max(count for count, pace in paces.items() if pace <= least * (1 + TOLERANCE))
    return configurations.best((1,) * stages)


def predict(
    row: Published,
    source: Source,
    known: Sequence[Efficiency],
    settings: Settings,
    step: Callable[[str], None] = lambda what: None,
) -> Row:
    """All that a row of the table says. `step` is told what is being computed."""
    configurations = Case(row, source.profile).configurations(known)
    free = configurations.problem
    parallel = one_stage(free, row.workers)
    base = evaluate(parallel, free)

    def scored(plan: Plan, score: Evaluation) -> Predicted:
        return Predicted(plan, score, base.pace_s / score.pace_s)

    step(f"{row.name}: the paper's configuration")
    paper = scored(*paper_plan(row, configurations))
    step(f"{row.name}: its rank")
    rank = configurations.rank(paper.score.alone_s)
    step(f"{row.name}: our plan")
    outcome = solve(replace(free, options=replace(free.options, memory=True)), settings)
    best = next((one for one in outcome.baselines if one.name.startswith("best straight")), None)
    straight = None
    if best is not None and best.plan is not None:
        straight = scored(best.plan, evaluate(best.plan, free))
    ours = scored(outcome.plan, outcome.evaluation)
    return Row(row, source, scored(parallel, base), paper, rank, ours, straight, outcome)
