"""`--fewest-workers`: the fewest busy workers with which a plan is nearly as fast as the best one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.errors import InputError
from pipeplan.planning.fast import best_plan
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.progress import Report
from pipeplan.planning.settings import SHARES, Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline, OutOfTime

_ROUNDING = 1e-9
"""Relative rounding error by which a pace may exceed the limit."""


@dataclass(frozen=True)
class FewestWorkers:
    """The plan on the fewest workers, and the plans on either side of it."""

    outcome: Outcome
    """The best plan on `workers` workers."""
    workers: int
    """The fewest busy workers that suffice."""
    best: Outcome
    """The best plan on any number of workers."""
    fewer_s: float | None
    """Seconds per minibatch of the best plan on one worker fewer, which is too slow; None if there is no such plan."""

    @property
    def slower(self) -> float:
        """How much slower the plan is than the best one by stated paces, relative."""
        return max(0.0, self.outcome.predicted_s / self.best.predicted_s - 1)


def search_fewest_workers(
    problem: Problem,
    within: float,
    settings: Settings | None = None,
    *,
    report: Report | None = None,
    deadline: Deadline | None = None,
) -> FewestWorkers:
    """The best plan on the fewest workers with which some plan is at most `within` (0.05: 5%) slower than the best.

    How few suffice is searched by the formulas.

    More workers never slow the best plan down, because they may stay idle; so a binary search finds the number. Under
    contention, where the best plan is not proven, the search finds a number that suffices while no smaller number that
    it tried does. The solvers that `settings` names give the best pace and the final plan; the DP alone gives the steps
    of the search, and no simpler plan is taken than the fastest. The best pace gets half of the time until the
    deadline, the steps half of the rest; a number of workers that there is no time to try counts as too few. Raises
    `InfeasibleError` if there is no plan at all.
    """
    if not 0 <= within <= 1:
        meant = f"; did you mean {within / 100:g}, which is {within:g}%?" if 1 < within <= 100 else ""
        raise InputError(
            f"the share by which a plan may be slower must be at least 0 and at most 1, not {within:g}{meant}"
        )
    settings = replace(settings or Settings(), simplest=0.0)
    deadline = deadline or Deadline.after(settings.time_limit_s)
    best = solve(problem, settings, report=report, deadline=deadline.share(SHARES["choice"]))
    steps = deadline.share(SHARES["choice"])
    fastest, score = best.plan, best.evaluation
    if best.simplification is not None:  # The simulation took another plan; how few workers suffice, the formulas say.
        fastest, score = best.simplification.fastest, best.simplification.fastest_score
    limit = score.pace_s * (1 + within)
    cuts = enumerate_cuts(problem, settings.maximum_cuts, steps.share(0.5))
    # Invariant: `low` workers are too few, with the pace `fewer`, and `high` workers suffice.
    low, fewer, high = 0, None, fastest.busy
    while high - low > 1:
        middle = (low + high) // 2
        try:
            pace = _pace(problem, cuts, middle, steps)
        except OutOfTime:
            pace = None
        if pace is not None and pace <= limit * (1 + _ROUNDING):
            high = middle
        else:
            low, fewer = middle, pace
    outcome = (
        best if high == best.plan.busy else solve(on_at_most(problem, high), settings, report=report, deadline=deadline)
    )
    return FewestWorkers(outcome, outcome.plan.busy, best, fewer)


def on_at_most(problem: Problem, workers: int) -> Problem:
    """The problem with at most so many busy workers."""
    return replace(problem, options=replace(problem.options, max_workers=workers))


def _pace(problem: Problem, cuts: Cuts, workers: int, deadline: Deadline) -> float | None:
    """Seconds per minibatch of the best plan on at most so many workers; None if there is no plan."""
    stages = problem.options.stages
    if stages is not None and stages > workers:
        return None
    best = best_plan(on_at_most(problem, workers), cuts, deadline=deadline)
    return None if best is None else best.pace_s
