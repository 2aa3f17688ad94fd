"""The second choice: the best plan with another configuration (the replica counts of its stages)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.planning.fast import USEFUL, best_plan
from pipeplan.planning.figure import figure_of
from pipeplan.planning.outcome import TOLERANCE
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline

MOST_STAGES = 32
"""Every number of stages up to this one is searched."""
SMALL = 5000
"""Largest product of cuts and workers for which every number of stages is searched."""
ENOUGH = 3
"""Once this many alternatives are known, parts are skipped if their bound excludes a better plan."""


@dataclass(frozen=True)
class Alternative:
    """The best plan of another configuration in one part of the space of plans."""

    part: str
    """Description of the part."""
    plan: Plan
    step_time_s: float
    behind: float
    """Relative slowdown against the best plan, by the formulas."""
    step_s: float | None = None
    """The step time that answers show, in seconds per minibatch, simulated where possible; None if unknown."""


@dataclass(frozen=True)
class Alternatives:
    """The alternatives that were found, best first, and the parts that were searched."""

    found: tuple[Alternative, ...]
    searched: tuple[str, ...]
    exact: bool
    """Whether the first alternative is proven to be the best plan of another configuration."""

    @property
    def second(self) -> Alternative | None:
        """The second choice; None if the searched parts contain no other configuration."""
        return self.found[0] if self.found else None


def find_alternatives(
    problem: Problem,
    cuts: Cuts,
    best: Plan,
    step_time_s: float,
    progress: Callable[[str], None] = lambda _: None,
) -> Alternatives:
    """Search parts of the space of plans that exclude the best plan's configuration, each part exactly.

    A part is a set of constraints that the best plan violates: another number of stages, fewer replicas in the largest
    stage, fewer workers, no copies. The parts miss plans that have the best plan's number of stages, and no fewer
    workers or replicas in the largest stage. The result is still exact if an alternative is as fast as
    the best plan, or if no missed plan exists (`_parts_are_exhaustive`). In large problems, few parts are searched.
    """
    alternatives: list[Alternative] = []
    searched = []
    each = len(cuts.ideals) * problem.cluster.workers <= SMALL
    enough = ENOUGH if each else 1
    for part, options in search_parts(problem, best, each=each):
        if len(alternatives) >= enough and _step_times(alternatives)[enough - 1] <= step_time_s * (1 + TOLERANCE):
            break
        progress(f"looking for a second choice: {part}")
        try:
            restricted = replace(problem, options=options)
            # The exact step time of a plan matters only if the plan is faster than the last alternative that is shown.
            useful_s = USEFUL * _step_times(alternatives)[ENOUGH - 1] if len(alternatives) >= ENOUGH else float("inf")
            rival = best_plan(restricted, cuts, useful_s=useful_s)
        except InputError:
            continue
        searched.append(part)
        if rival is not None and rival.plan.config != best.config:
            alternatives.append(Alternative(part, rival.plan, rival.step_time_s, rival.step_time_s / step_time_s - 1))
    alternatives.sort(key=lambda one: (one.step_time_s, len(one.plan.stages), one.plan.config))
    best_of = {one.plan.config: one for one in reversed(alternatives)}
    alternatives = [one for one in alternatives if one is best_of[one.plan.config]]
    tied = bool(alternatives) and alternatives[0].step_time_s <= step_time_s * (1 + TOLERANCE)
    known = tied or (each and _parts_are_exhaustive(problem, best))
    certain = cuts.complete and not any(
        _contended(plan, problem) for plan in [best, *(alternative.plan for alternative in alternatives[:1])]
    )
    return Alternatives(tuple(alternatives[:ENOUGH]), tuple(searched), certain and known)


def with_figures(alternatives: Alternatives, problem: Problem, deadline: Deadline) -> Alternatives:
    """The alternatives with their simulated step times, still in the order of their step times by the formulas."""
    found = []
    for one in alternatives.found:
        figure = figure_of(one.plan, evaluate(one.plan, problem), problem, deadline)
        found.append(replace(one, step_s=figure.step_s))
    return replace(alternatives, found=tuple(found))


def _contended(plan: Plan, problem: Problem) -> bool:
    """Whether shared network cards slow down a plan.

    Such a plan is not proven to be the best, and its step time is no bound for other plans.
    """
    score = evaluate(plan, problem)
    return score.step_time_s > score.alone_s * (1 + TOLERANCE)


def _step_times(alternatives: list[Alternative]) -> list[float]:
    return sorted(alternative.step_time_s for alternative in alternatives)


def search_parts(problem: Problem, best: Plan, *, each: bool = True) -> Iterator[tuple[str, Options]]:
    """The parts, by name, as options with one additional constraint.

    Parts that are likely to contain the second choice come first, because its step time helps to skip other parts.
    Without `each`, all smaller numbers of stages form one part, and only the next larger number is searched.
    """
    options, stages = problem.options, len(best.stages)
    if options.stages is None and not each:
        if stages > 1:
            yield f"at most {stages - 1} stage{'s' * (stages > 2)}", replace(options, max_stages=stages - 1)
        if options.max_stages is None or options.max_stages > stages:
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


def _parts_are_exhaustive(problem: Problem, best: Plan) -> bool:
    """Whether the parts contain every configuration except the best plan's.

    True if the best plan has one stage on all workers that the options allow, or if no stage may be replicated.
    """
    options, everyone = problem.options, problem.cluster.workers
    if options.stages is None and min(len(problem.units), everyone, options.max_stages or everyone) > MOST_STAGES:
        return False
    if best.copies > 1:
        return False
    most = min(everyone, options.max_workers or everyone, options.max_replicas or everyone)
    return (len(best.stages) == 1 and best.busy == most) or (options.max_replicas == 1 and not options.allow_copies)
