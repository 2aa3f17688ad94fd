"""The second choice: the best plan whose configuration (replicas of every stage) is another one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeplan.cuts import Cuts
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.problem import Options, Problem
from pipeplan.quick import best_plan
from pipeplan.verdict import TOLERANCE

MOST_STAGES = 32
"""Numbers of stages beyond the best plan's are tried one by one, up to this."""


@dataclass(frozen=True)
class Alternative:
    """The best plan of another configuration in one part of the space of plans."""

    part: str
    """In which part, in words."""
    plan: Plan
    pace_s: float
    behind: float
    """How much slower than the best plan, relative."""


@dataclass(frozen=True)
class Alternatives:
    """What was found, best first, and what was searched for it."""

    found: tuple[Alternative, ...]
    searched: tuple[str, ...]
    exact: bool
    """Whether no plan of another configuration can be better than the first that was found."""

    @property
    def second(self) -> Alternative | None:
        """The second choice; None where the searched parts hold no other configuration."""
        return self.found[0] if self.found else None


def alternatives(problem: Problem, cuts: Cuts, best: Plan, pace_s: float) -> Alternatives:
    """Search the parts of the space that leave the best plan's configuration out, each exactly.

    A part is a set of constraints that the best plan does not satisfy: another number of stages, fewer replicas in the
    largest stage, fewer workers, no copies. A plan with as many stages and workers as the best one, and no smaller a
    largest stage, lies in none of them. Nothing better is left out where an alternative is as good as the best plan, or
    where there are no such plans (`_alone`).
    """
    found, searched = [], []
    for part, options in parts(problem, best):
        try:
            other = best_plan(replace(problem, options=options), cuts)
        except InputError:
            continue
        searched.append(part)
        if other is not None and other.plan.config != best.config:
            found.append(Alternative(part, other.plan, other.pace_s, other.pace_s / pace_s - 1))
    found = _distinct(sorted(found, key=lambda one: (one.pace_s, len(one.plan.stages), one.plan.config)))
    tied = bool(found) and found[0].pace_s <= pace_s * (1 + TOLERANCE)
    return Alternatives(tuple(found), tuple(searched), cuts.complete and (tied or _alone(problem, best)))


def parts(problem: Problem, best: Plan) -> Iterator[tuple[str, Options]]:
    """The parts, by name, as options that say the same and one thing more."""
    options, stages = problem.options, len(best.stages)
    if options.stages is None:
        most = min(len(problem.units), problem.cluster.workers, options.max_stages or MOST_STAGES, MOST_STAGES)
        for count in range(1, most + 1):
            if count != stages:
                yield f"{count} stage{'s' * (count > 1)}", replace(options, stages=count, max_stages=None)
    largest = max(stage.replicas for stage in best.stages) // best.copies
    if largest > 1:
        smaller = replace(options, stages=stages, max_stages=None, max_replicas=largest - 1)
        yield f"{stages} stage{'s' * (stages > 1)} of at most {largest - 1} replicas", smaller
    if best.busy > 1:
        yield f"at most {best.busy - 1} workers", replace(options, max_workers=best.busy - 1)
    if best.copies > 1:
        yield "no copies of the pipeline", replace(options, allow_copies=False)


def _alone(problem: Problem, best: Plan) -> bool:
    """Whether every other configuration lies in one of the parts, for all problems of this kind.

    So it is for one stage on as many workers as there may be, and where no stage may be replicated.
    """
    options, everyone = problem.options, problem.cluster.workers
    if options.stages is None and min(len(problem.units), everyone, options.max_stages or everyone) > MOST_STAGES:
        return False
    if best.copies > 1:
        return False
    most = min(everyone, options.max_workers or everyone, options.max_replicas or everyone)
    return (len(best.stages) == 1 and best.busy == most) or (options.max_replicas == 1 and not options.allow_copies)


def _distinct(found: list[Alternative]) -> list[Alternative]:
    """The best of every configuration."""
    kept: dict[str, Alternative] = {}
    for one in found:
        kept.setdefault(one.plan.config, one)
    return list(kept.values())
