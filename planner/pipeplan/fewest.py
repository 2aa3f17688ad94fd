"""The fewest busy workers with which a plan is nearly as fast as the best."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.cuts import Cuts, enumerate_cuts
from pipeplan.errors import InputError
from pipeplan.problem import Problem
from pipeplan.quick import best_plan
from pipeplan.solving import Outcome, Settings, solve

_ROUNDING = 1e-9
"""Relative: a pace at the limit but for rounding is within it."""


@dataclass(frozen=True)
class Fewest:
    """The answer, and what it is measured against."""

    outcome: Outcome
    """The best plan on so few workers."""
    workers: int
    """The fewest busy workers that will do."""
    best: Outcome
    """The best plan on any number of workers."""
    fewer_s: float | None
    """Pace of the best plan on one worker less, which is too slow; None where there is none."""

    @property
    def slower(self) -> float:
        """How much slower than the best it is, relative."""
        return max(0.0, self.outcome.evaluation.pace_s / self.best.evaluation.pace_s - 1)


def fewest_workers(problem: Problem, within: float, settings: Settings | None = None) -> Fewest:
    """The best plan on the fewest workers with which some plan is at most `within` (0.05: 5%) slower than the best.

    More workers never do harm, as they may stay idle, so that halving finds the number (under contention, where the
    best plan is not proven, one that will do and that no fewer tried will). The best pace, and the plan
    for the number found, come from the solvers that `settings` names; the steps of the search from the DP.
    Raises `InfeasibleError` where there is no plan at all.
    """
    if not 0 <= within < float("inf"):
        raise InputError(f"the share by which a plan may be slower must be at least 0, not {within:g}")
    settings = settings or Settings()
    best = solve(problem, settings)
    limit = best.evaluation.pace_s * (1 + within)
    cuts = enumerate_cuts(problem, settings.maximum_cuts)
    # `low` workers are too few, with this pace; `high` are enough.
    low, fewer, high = 0, None, best.plan.busy
    while high - low > 1:
        middle = (low + high) // 2
        pace = _pace(problem, cuts, middle)
        if pace is not None and pace <= limit * (1 + _ROUNDING):
            high = middle
        else:
            low, fewer = middle, pace
    outcome = best if high == best.plan.busy else solve(on_at_most(problem, high), settings)
    return Fewest(outcome, outcome.plan.busy, best, fewer)


def on_at_most(problem: Problem, workers: int) -> Problem:
    """The problem with at most so many busy workers."""
    return replace(problem, options=replace(problem.options, max_workers=workers))


def _pace(problem: Problem, cuts: Cuts, workers: int) -> float | None:
    """Of the best plan on at most so many workers, s per minibatch."""
    stages = problem.options.stages
    if stages is not None and stages > workers:
        return None
    best = best_plan(on_at_most(problem, workers), cuts)
    return None if best is None else best.pace_s
