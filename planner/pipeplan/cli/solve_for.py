"""`pipeplan solve --for TARGET`: the best plan that another trainer can express, its files, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from pipeplan.cli.export import said
from pipeplan.cli.options import words
from pipeplan.cuts import enumerate_cuts
from pipeplan.errors import InputError
from pipeplan.exports import written
from pipeplan.exports.target import NAMES, File, Target, target
from pipeplan.plan import FLUSHING, STASHING, Plan
from pipeplan.problem import Options, Problem
from pipeplan.quick import best_plan
from pipeplan.solving import Outcome
from pipeplan.verdict import TOLERANCE

for_option = click.option(
    "--for",
    "target_name",
    metavar="TARGET",
    shell_complete=words(*NAMES),
    help=f"The best plan for another trainer, and its files in the plan's folder: {', '.join(NAMES)}.",
)


@dataclass(frozen=True)
class Wanted:
    """A target, and the problem as it would be without it."""

    to: Target
    free: Problem

    @property
    def problem(self) -> Problem:
        """Restricted to what the target expresses."""
        return replace(self.free, options=self.to.restrict(self.free.profile, self.free.options))

    def files(self, plan: Plan, problem: Problem) -> Mapping[str, File]:
        """What the target reads; an `InputError` where it cannot express the plan after all."""
        return written.export(self.to, problem, plan)

    def write(self, outcome: Outcome, folder: Path, *, force: bool) -> list[str]:
        """Write the files beside a plan in its folder; the lines that say so."""
        files = self.files(outcome.plan, outcome.problem)
        written.write(folder / self.to.name, files, force=force)
        return said(self.to, folder / self.to.name, files, (outcome.problem, outcome.plan))

    def cost(self, outcome: Outcome, maximum_cuts: int) -> str:
        """What the restriction costs: the best plans without it, with the same schedule and with pipeplan's own.

        They are the dynamic program's alone.
        """
        asked, found = self.free.options, []
        same = replace(asked, schedule=outcome.problem.options.schedule, accumulate=outcome.problem.options.accumulate)
        for options in _distinct(same, _own(asked)):
            problem = replace(outcome.problem, options=options)
            best = best_plan(problem, enumerate_cuts(problem, maximum_cuts))
            if best is None:
                continue
            gain = outcome.objective_s / best.pace_s
            faster = f"{gain:.2f}x faster" if gain > 1 + TOLERANCE else "no faster"
            found.append(f"{best.plan.config} by {options.schedule}, {faster}")
        return f"Restricted to what {self.to.title} can express. Without the restriction: {'; '.join(found)}."


def wanted(name: str | None, problem: Problem) -> Wanted | None:
    """The target of that name, for a problem as it would be without."""
    return None if name is None else Wanted(target(name), problem)


def accumulated(given: dict[str, Any], batch: int | None, minibatch: int) -> int | None:
    """Minibatches per update: as given, or of a batch of so many samples."""
    accumulate: int | None = given["accumulate"]
    if batch is None:
        return accumulate
    if accumulate is not None:
        raise InputError("--accumulate follows from --batch: leave one of them out")
    if batch < 1 or batch % minibatch:
        raise InputError(
            f"a batch of {batch} samples cannot be cut into minibatches of {minibatch}: give --batch a multiple, or "
            "--minibatch another size"
        )
    return batch // minibatch


def _own(asked: Options) -> Options:
    """With the schedule that pipeplan would take where none is asked for."""
    return asked if asked.schedule in FLUSHING else replace(asked, schedule=STASHING, accumulate=None)


def _distinct(*several: Options) -> list[Options]:
    return list(dict.fromkeys(several))
