"""Planning for a trainer: the problem restricted to what it can express, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeplan.cuts import enumerate_cuts
from pipeplan.exports import written
from pipeplan.exports.target import File, Target
from pipeplan.plan import FLUSHING, STASHING
from pipeplan.problem import Options, Problem
from pipeplan.quick import best_plan
from pipeplan.solving import Outcome
from pipeplan.verdict import TOLERANCE


@dataclass(frozen=True)
class Aim:
    """A target, and the problem as it would be without it."""

    to: Target
    free: Problem

    @property
    def problem(self) -> Problem:
        """Restricted to what the target expresses. Raises `InputError` where nothing is left."""
        return replace(self.free, options=self.to.restrict(self.free.profile, self.free.options))

    def files(self, outcome: Outcome) -> Mapping[str, File]:
        """What the target reads; an `InputError` where it cannot express the plan after all."""
        return written.export(self.to, outcome.problem, outcome.plan)

    def cost(self, outcome: Outcome, maximum_cuts: int) -> str:
        """What the restriction costs: the best plans without it, with the same schedule and with pipeplan's own.

        They are the dynamic program's alone.
        """
        # Workers that the user did without are no loss by the target.
        asked, found = replace(self.free.options, max_workers=outcome.problem.options.max_workers), []
        same = replace(asked, schedule=outcome.problem.options.schedule, accumulate=outcome.problem.options.accumulate)
        for options in dict.fromkeys((same, _own(asked))):
            problem = replace(outcome.problem, options=options)
            best = best_plan(problem, enumerate_cuts(problem, maximum_cuts))
            if best is None:
                continue
            gain = faster(outcome.objective_s / best.pace_s)
            found.append(f"{best.plan.config} by {options.schedule}, {gain}")
        return f"Restricted to what {self.to.title} can express. Without the restriction: {'; '.join(found)}."


def faster(gain: float) -> str:
    """So many times as fast, in words. What rounds to once as fast is said to be less than a percent."""
    if gain <= 1 + TOLERANCE:
        return "no faster"
    return "less than 1% faster" if gain < 1.005 else f"{gain:.2f}x faster"


def _own(asked: Options) -> Options:
    """With the schedule that pipeplan would take where none is asked for."""
    return asked if asked.schedule in FLUSHING else replace(asked, schedule=STASHING, accumulate=None)
