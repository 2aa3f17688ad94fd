"""Candidates of a choice: plans that train the same global batch, each the best of its kind by the figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost import contention
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import plain_data_parallel, worker_memory
from pipeplan.errors import InfeasibleError, InputError, NotFoundInTimeError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import DOUBLE_BUFFERED, FLUSH, STASHING
from pipeplan.plan.updates import Updates
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.figure import TOLERANCE, Figure, FiguredPlan, figured
from pipeplan.planning.local_search import PlanSearch
from pipeplan.planning.question import ANY, Question
from pipeplan.planning.virtual_stages.virtual_search import search_virtual
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline
from pipeplan.util.units import show_step_time

EXTRAPOLATED = " (extrapolated)"
"""The mark of a microbatch size that a profile neither holds nor interpolates."""
CHOICE_GAP = 0.01
"""The local search starts from plans within this gap of the best one by the formulas, where there are many cuts."""


@dataclass(frozen=True)
class Candidate:
    """The best plan of one kind."""

    kind: str
    """Its name for people, such as `DDP`."""
    problem: Problem
    plan: Plan
    figure: Figure
    extrapolated: bool = False
    """Whether the profile has no times for this microbatch size, nor for a smaller and a larger one."""
    allowed: bool = True
    """Whether it satisfies the user's constraints; others are only compared with."""

    @property
    def cluster(self) -> Cluster:
        """The machines that it is planned for."""
        return self.problem.cluster

    @property
    def sharding(self) -> Sharding:
        """What its replicas divide among them."""
        return self.problem.options.sharding

    @property
    def sample_s(self) -> float:
        """Seconds per sample."""
        return self.figure.step_s / self.problem.profile.minibatch

    @property
    def formula_sample_s(self) -> float:
        """Seconds per sample by the formulas."""
        return self.figure.formula_s / self.problem.profile.minibatch

    @property
    def updates(self) -> Updates:
        """How old its gradients are, and what its updates average over."""
        return Updates.of(self.plan, self.problem.profile.minibatch)

    @property
    def delay(self) -> int:
        """The age of its oldest gradients, in updates; 0 for synchronous plans."""
        return 0 if self.plan.inference else max(self.updates.stale_by)

    @property
    def text(self) -> str:
        """Configuration, microbatch and throughput in a few words."""
        size = f"{self.problem.profile.minibatch}{EXTRAPOLATED if self.extrapolated else ''}"
        return f"{self.plan.config}, microbatch {size}: {show_step_time(1 / self.sample_s)} samples/s"

    def to_json(self) -> dict[str, Any]:
        """The fields that plan.json holds for it."""
        return {
            "kind": self.kind,
            "config": self.plan.config,
            "schedule": self.plan.schedule,
            "accumulate": self.plan.accumulate,
            "minibatch": self.problem.profile.minibatch,
            "minibatch_s": self.figure.step_s,
            "formulas_s": self.figure.formula_s,
            "samples_per_s": 1 / self.sample_s,
            "simulated": self.figure.simulated_s is not None,
            "extrapolated": self.extrapolated,
            "correction": self.problem.options.correction,
            "data_parallel": self.problem.options.data_parallel(self.plan),
            "workers": self.plan.busy,
            "allowed": self.allowed,
            "updates": self.updates.to_json(),
        }


def candidate_of(
    kind: str,
    problem: Problem,
    maximum_cuts: int,
    deadline: Deadline,
    useful_s: float = float("inf"),
    *,
    simulates: bool = True,
    gap: float = CHOICE_GAP,
) -> tuple[Candidate | None, float]:
    """(the best plan of a problem by the formulas or None, a lower bound on the seconds per microbatch of all plans).

    Plans that take `useful_s` seconds per microbatch or more by the formulas, which are lower bounds, are of no use.
    With a `gap` of 0 all cuts are searched where there are many; otherwise those between repeated blocks, and the bound
    is then that of `least_step_s`.
    """
    if problem.options.stages == 1 and _never_fits(problem):
        return None, useful_s
    least_s = least_step_s(problem)
    if least_s >= useful_s:
        return None, useful_s
    best, searched_all = best_in_time(problem, maximum_cuts, deadline, gap, useful_s)
    if best is None:
        return None, useful_s if searched_all else least_s
    bound_s = min(max(best.bound_s, least_s), useful_s)
    if best.step_time_s >= useful_s:
        return None, bound_s
    found = figured(best.plan, evaluate(best.plan, problem), problem, deadline, simulates=simulates)
    return Candidate(kind, problem, found.plan, found.figure), bound_s


def improved(one: Candidate, search: PlanSearch) -> Candidate:
    """The best plan by the figure near a candidate; the candidate itself if nothing near it is faster."""
    found = search.climb(FiguredPlan(one.plan, evaluate(one.plan, one.problem), one.figure))
    return replace(one, plan=found.plan, figure=found.figure)


def _never_fits(problem: Problem) -> bool:
    """Whether the whole model takes more memory than the largest device has, even if all workers divide its state."""
    whole = plain_data_parallel(problem, problem.cluster.workers)
    again = replace(whole, stages=(replace(whole.stages[0], recompute=True),))
    ways = (whole, again) if problem.options.recompute else (whole,)
    most = max(problem.memory_of([worker]) for worker in range(problem.cluster.workers))
    return all(worker_memory(one, problem, 0)[0] > most for one in ways)


def least_step_s(problem: Problem) -> float:
    """A lower bound on the seconds per microbatch of every plan: all workers compute all the time."""
    return max(problem.work_s / problem.cluster.total_speed, contention.least_step_time_of_shared_cores_s(problem))


def fastest_found(kind: str, search: PlanSearch) -> list[Candidate]:
    """The plans within the tolerance of the fastest one that a search has simulated."""
    least_s = min((one.step_s for one in search.found.values()), default=0.0)
    found = (one for one in search.found.values() if one.step_s <= least_s * (1 + TOLERANCE))
    return [Candidate(kind, search.problem, one.plan, one.figure) for one in found]


def like(plan: Plan, kind: str, search: PlanSearch) -> list[Candidate]:
    """The best plan near one with the stages of a plan of another schedule or microbatch size, if these fit."""
    one = search.like(plan)
    return [] if one is None else [Candidate(kind, search.problem, one.plan, one.figure)]


def virtual_candidate(problem: Problem, deadline: Deadline, useful_s: float = float("inf")) -> Candidate | None:
    """The best plan of a schedule whose workers run several stages each.

    None where none fits, is found in time, or seems to take less than `useful_s` seconds per microbatch.
    """
    try:
        plans = search_virtual(problem, deadline, useful_s).plans
    except (InfeasibleError, InputError, NotFoundInTimeError):
        return None
    if not plans:
        return None
    best = plans[0]
    figure = Figure(best.score.step_time_s, best.simulated_s, best.minibatches)
    return Candidate(problem.options.schedule, problem, best.plan, figure)


def under(schedule: str, one: Candidate) -> Problem | None:
    """The problem of a candidate under another schedule; None unless it is one pipeline under 1f1b-flush."""
    options = one.problem.options
    if len(one.plan.stages) == 1 or one.plan.copies > 1 or options.schedule != FLUSH:
        return None
    return replace(one.problem, options=replace(options, schedule=schedule))


def comparable(one: Candidate, start: Candidate) -> bool:
    """Whether the figures of both plans are simulated, or neither is.

    The formulas of 1f1b-flush are a loose lower bound, those of the other schedules are nearer to the simulation. So a
    plan that is faster by formulas is faster.
    """
    return (one.figure.simulated_s is None) == (start.figure.simulated_s is None)


def stale_problems(question: Question, tolerated: float) -> Iterator[Problem]:
    """The problems whose plans may have gradients up to so many updates old.

    1f1b-stashing updates a stage after as many microbatches as it has replicas. With a given batch no stage may update
    less often than that, which 2bw keeps.
    """
    options, size = question.options, question.minibatch or question.machines.profile.minibatch
    kinds: list[dict[str, Any]] = []
    if question.batch is None:
        kinds.append({"schedule": STASHING, "accumulate": None})
        if tolerated != ANY and options.stages is None:
            # Gradients of an unreplicated pipeline are as old as stages follow.
            kinds.append(kinds[0] | {"max_stages": min(int(tolerated) + 1, options.max_stages or 99)})
    if question.samples % size == 0:
        kinds.append({"schedule": DOUBLE_BUFFERED})
    for changes in kinds:
        try:
            yield question.problem(size, virtual_stages=options.virtual_stages, **changes)
        except InputError:
            continue


def best_of(found: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the most samples per second, or None."""
    return min(found, key=lambda one: one.sample_s, default=None)
