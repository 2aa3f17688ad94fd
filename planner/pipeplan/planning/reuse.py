"""Searches that reuse what similar ones have found: for sweeps and explanations, which solve many problems.

The solvers keep the answers (`solvers.known_answers`). How fast a known plan is under another problem says the
evaluator, which no solver uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan
from pipeplan.problem.problem import Problem
from pipeplan.solvers.known_answers import KNOWN, KnownAnswers


@contextmanager
def reusing() -> Iterator[None]:
    """Searches inside the block keep what they find, and use what is known; blocks inside others share it."""
    token = KNOWN.set(KNOWN.get() or KnownAnswers(pace_of))
    try:
        yield
    finally:
        KNOWN.reset(token)


def keep_answers() -> None:
    """From now on, all searches of this process keep what they find, and use what is known."""
    KNOWN.set(KnownAnswers(pace_of))


def pace_of(plan: Plan, problem: Problem) -> float:
    """The pace of a plan under a problem, in seconds per minibatch; infinite if it does not fit in memory."""
    deep = depths.assign_depths(plan, problem, problem.work_s / problem.cluster.total_speed)
    score = evaluate(deep, problem)
    if problem.options.memory and not score.fits:
        score = evaluate(depths.assign_depths(plan, problem, score.pace_s), problem)
    return score.pace_s if score.fits or not problem.options.memory else float("inf")
