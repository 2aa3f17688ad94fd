"""The second choice: the best plan whose configuration (replicas of every stage) is another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipeplan.cuts import Cuts
from pipeplan.errors import InputError
from pipeplan.evaluate import evaluate
from pipeplan.plan import Plan
from pipeplan.problem import Options, Problem
from pipeplan.quick import best_plan
from pipeplan.solvers import dp
from pipeplan.verdict import TOLERANCE

MOST_STAGES = 32
"""Numbers of stages are tried one by one, up to this."""
SMALL = 5000
"""Cuts times workers."""
ENOUGH = 3
"""Where so many were found, a part that can hold nothing better than all of them is left."""


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


def alternatives(
    problem: Problem,
    cuts: Cuts,
    best: Plan,
    pace_s: float,
    progress: Callable[[str], None] = lambda _: None,
    *,
    each: bool = True,
) -> Alternatives:
    """Search the parts of the space that leave the best plan's configuration out, each exactly.

    A part is a set of constraints that the best plan does not satisfy: another number of stages, fewer replicas in the
    largest stage, fewer workers, no copies. A plan with as many stages and workers as the best one, and no smaller a
    largest stage, lies in none of them. Nothing better is left out where an alternative is as good as the best plan, or
    where there are no such plans (`_alone`). Without `each` few parts are searched, as for large problems.
    """
    found: list[Alternative] = []
    searched = []
    each = each and _small(problem, cuts)
    enough = ENOUGH if each else 1
    for part, options in parts(problem, best, each=each):
        if len(found) >= enough and _paces(found)[enough - 1] <= pace_s * (1 + TOLERANCE):
            break
        progress(f"looking for a second choice: {part}")
        try:
            restricted = replace(problem, options=options)
            hopeless = len(found) >= ENOUGH and _bound(restricted, cuts) > _paces(found)[ENOUGH - 1]
            other = None if hopeless else best_plan(restricted, cuts)
        except InputError:
            continue
        searched.append(part)
        if other is not None and other.plan.config != best.config:
            found.append(Alternative(part, other.plan, other.pace_s, other.pace_s / pace_s - 1))
    found = _distinct(sorted(found, key=lambda one: (one.pace_s, len(one.plan.stages), one.plan.config)))
    tied = bool(found) and found[0].pace_s <= pace_s * (1 + TOLERANCE)
    known = tied or (each and _alone(problem, best))
    certain = cuts.complete and not any(_contended(plan, problem) for plan in [best, *(one.plan for one in found[:1])])
    return Alternatives(tuple(found[:ENOUGH]), tuple(searched), certain and known)


def _contended(plan: Plan, problem: Problem) -> bool:
    """Whether shared network cards slow a plan: then it need not be the best, and its pace bounds no other's."""
    score = evaluate(plan, problem)
    return score.pace_s > score.alone_s * (1 + TOLERANCE)


def _bound(problem: Problem, cuts: Cuts) -> float:
    """A pace that no plan beats, far sooner found than the best plan where memory binds: that without a limit on it."""
    return dp.solve(replace(problem, options=replace(problem.options, memory=False)), cuts).bound_s


def _paces(found: list[Alternative]) -> list[float]:
    return sorted(one.pace_s for one in found)


def _small(problem: Problem, cuts: Cuts) -> bool:
    """Whether every number of stages can be tried in little time."""
    return len(cuts.ideals) * problem.cluster.workers <= SMALL


def parts(problem: Problem, best: Plan, *, each: bool = True) -> Iterator[tuple[str, Options]]:
    """The parts, by name, as options that say the same and one thing more; those first that are likely to hold the
    second choice, as it rules others out. Without `each` not every number of stages is a part of its own: those below
    the best plan's are one, and of those above it there is the first."""
    options, stages = problem.options, len(best.stages)
    if options.stages is None and not each:
        if stages > 1:
            yield f"at most {stages - 1} stage{'s' * (stages > 2)}", replace(options, max_stages=stages - 1)
        yield f"{stages + 1} stages", replace(options, stages=stages + 1)
    largest = max(stage.replicas for stage in best.stages) // best.copies
    if largest > 1:
        smaller = replace(options, stages=stages, max_stages=None, max_replicas=largest - 1)
        yield f"{stages} stage{'s' * (stages > 1)} of at most {largest - 1} replicas", smaller
    if best.busy > 1:
        yield f"at most {best.busy - 1} workers", replace(options, max_workers=best.busy - 1)
    if best.copies > 1:
        yield "no copies of the pipeline", replace(options, allow_copies=False)
    if options.stages is None and each:
        most = min(len(problem.units), problem.cluster.workers, options.max_stages or MOST_STAGES, MOST_STAGES)
        for count in sorted(set(range(1, most + 1)) - {stages}, key=lambda count: (abs(count - stages), count)):
            yield f"{count} stage{'s' * (count > 1)}", replace(options, stages=count, max_stages=None)


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
