"""Planning for a trainer: restricts a problem to the plans that the trainer can express, and prices the restriction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeplan.cost.evaluate import evaluate
from pipeplan.exports.target import ExportFile, ExportTarget, export_files
from pipeplan.plan.schedules import FLUSHING, STASHING
from pipeplan.planning.fast import best_plan
from pipeplan.planning.figure import figured
from pipeplan.planning.local_search import improve
from pipeplan.planning.outcome import TOLERANCE, Outcome
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline

SIMULATING_S = 5.0
"""Seconds to simulate a plan without the restriction."""


@dataclass(frozen=True)
class TargetedProblem:
    """A target, and the problem without the restrictions of the target."""

    target: ExportTarget
    unrestricted: Problem

    @property
    def problem(self) -> Problem:
        """The problem restricted to plans that the target can express. Raises `InputError` if there are none."""
        problem = self.unrestricted
        return replace(problem, options=self.target.restrict(problem.profile, problem.options))

    def files(self, outcome: Outcome) -> Mapping[str, ExportFile]:
        """The files that the target reads. Raises `InputError` if it cannot express the plan after all."""
        return export_files(self.target, outcome.problem, outcome.plan)

    def cost(self, outcome: Outcome, maximum_cuts: int) -> str:
        """The cost of the restriction as a sentence: the best plans without it, and how much faster they are stated.

        One has the schedule of the target, the other pipeplan's default one. Only the dynamic program looks for them.
        """
        # The user's limit on workers holds for these plans too: it is no cost of the target.
        restricted = outcome.problem.options
        unrestricted = replace(self.unrestricted.options, max_workers=restricted.max_workers)
        target_schedule = replace(unrestricted, schedule=restricted.schedule, accumulate=restricted.accumulate)
        default = unrestricted
        if unrestricted.schedule not in FLUSHING:  # weight stashing, unless the user asked for a schedule with a flush
            default = replace(unrestricted, schedule=STASHING, accumulate=None)
        alternatives = []
        for options in dict.fromkeys((target_schedule, default)):
            problem = replace(outcome.problem, options=options)
            best = best_plan(problem, enumerate_cuts(problem, maximum_cuts))
            if best is None:
                continue
            ends = Deadline.after(SIMULATING_S)
            start = figured(best.plan, evaluate(best.plan, problem), problem, ends)
            pace_s = improve(start, problem, ends).step_s
            gain = speedup_text(outcome.predicted_s / pace_s)
            alternatives.append(f"{best.plan.config} by {options.schedule}, {gain}")
        return (
            f"Restricted to what {self.target.title} can express. Without the restriction: {'; '.join(alternatives)}."
        )


def speedup_text(gain: float) -> str:
    """A speedup in words: `no faster`, `less than 1% faster` or `1.23x faster`."""
    if gain <= 1 + TOLERANCE:
        return "no faster"
    return "less than 1% faster" if gain < 1.005 else f"{gain:.2f}x faster"
