"""Candidates of a choice: plans that train the same global batch, each the best of its kind by the figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost import contention
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import plain_data_parallel, worker_memory
from pipeplan.errors import InfeasibleError, InputError, NotFoundInTimeError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSH, VIRTUAL, ZERO_BUBBLE
from pipeplan.plan.updates import Updates
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.figure import TOLERANCE, Figure, FiguredPlan, figured
from pipeplan.planning.local_search import PlanSearch, improve
from pipeplan.planning.virtual_stages.virtual_search import search_virtual
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.rescale import halved
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


@dataclass(frozen=True)
class Machines:
    """A profile and a cluster that a candidate may be planned for."""

    profile: Profile
    cluster: Cluster


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


def improved(one: Candidate, deadline: Deadline) -> Candidate:
    """The best plan by the figure near a candidate; the candidate itself if nothing near it is faster."""
    score = evaluate(one.plan, one.problem)
    found = improve(FiguredPlan(one.plan, score, one.figure), one.problem, deadline)
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


def fastest_found(kind: str, search: PlanSearch, extrapolated: bool) -> list[Candidate]:
    """The plans within the tolerance of the fastest one that a search has simulated."""
    least_s = min((one.step_s for one in search.found.values()), default=0.0)
    found = (one for one in search.found.values() if one.step_s <= least_s * (1 + TOLERANCE))
    return [Candidate(kind, search.problem, one.plan, one.figure, extrapolated) for one in found]


def zero_bubbles(start: Candidate, deadline: Deadline) -> list[Candidate]:
    """zb-h1 with the stages of a plan of 1f1b-flush."""
    if not _is_pipeline(start):
        return []
    problem = replace(start.problem, options=replace(start.problem.options, schedule=ZERO_BUBBLE))
    found = like(start.plan, ZERO_BUBBLE, problem, deadline)
    return [replace(one, extrapolated=start.extrapolated) for one in found if _comparable(one, start)]


def like(plan: Plan, kind: str, problem: Problem, deadline: Deadline) -> list[Candidate]:
    """The best plan near one with the stages of a plan of another schedule or microbatch size, if these fit."""
    one = PlanSearch(problem, deadline).like(plan)
    return [] if one is None else [Candidate(kind, problem, one.plan, one.figure)]


def virtual_flushes(start: Candidate, deadline: Deadline) -> list[Candidate]:
    """interleaved-1f1b and zb-v for the problem of a plan of 1f1b-flush.

    A worker has several stages there, so that other cuts than those of the plan are searched for.
    """
    found: list[Candidate] = []
    for schedule in VIRTUAL if _is_pipeline(start) else ():
        problem = replace(start.problem, options=replace(start.problem.options, schedule=schedule))
        one = virtual_candidate(problem, deadline.share(0.5), extrapolated=start.extrapolated)
        if one is not None and _comparable(one, start):
            found.append(one)
    return found


def virtual_candidate(problem: Problem, deadline: Deadline, *, extrapolated: bool = False) -> Candidate | None:
    """The best plan of a schedule whose workers run several stages each; None where none fits or is found in time."""
    try:
        best = search_virtual(problem, deadline).plans[0]
    except (InfeasibleError, InputError, NotFoundInTimeError):
        return None
    figure = Figure(best.score.step_time_s, best.simulated_s, best.minibatches)
    return Candidate(problem.options.schedule, problem, best.plan, figure, extrapolated)


def _comparable(one: Candidate, start: Candidate) -> bool:
    """Whether the figures of both plans are simulated, or neither is.

    The formulas of 1f1b-flush are a loose lower bound, those of the other schedules are nearer to the simulation. So a
    plan that is faster by formulas is faster.
    """
    return (one.figure.simulated_s is None) == (start.figure.simulated_s is None)


def _is_pipeline(one: Candidate) -> bool:
    """Whether it is one pipeline under 1f1b-flush, which other schedules can run."""
    return len(one.plan.stages) > 1 and one.plan.copies == 1 and one.problem.options.schedule == FLUSH


def microbatches(batch: int, size: int) -> int:
    """The number of microbatches of a size in a global batch. Raises `InputError` where it cannot be cut so."""
    if batch < 1 or batch % size:
        raise InputError(f"a batch of {batch} samples cannot be cut into microbatches of {size}: give a multiple")
    return batch // size


def sizes_for(profile: Profile, batch: int, given: int | None) -> tuple[list[int], list[int]]:
    """(microbatch sizes with measured or interpolated times, further sizes), all dividing the batch, largest first.

    Raises `InputError` if there is none.
    """
    measured = [size.minibatch for size in profile.all_sizes]
    if given is not None:
        microbatches(batch, given)
        return [given], []
    tried = sorted({*measured, *halved(profile.minibatch)}, reverse=True)
    dividing = [size for size in tried if batch % size == 0]
    if not dividing:
        raise InputError(
            f"a batch of {batch} samples cannot be cut into microbatches of {', '.join(map(str, tried))}: "
            "give --batch a multiple, or --microbatch another size"
        )
    known = [size for size in dividing if measured[0] <= size <= measured[-1]]
    return known, [size for size in dividing if size not in known]


def sized(profile: Profile, size: int) -> Profile:
    """The profile at a microbatch size; times that nobody measured are upper bounds."""
    return profile if size == profile.minibatch else profile.rescaled(size, pessimistic=True)


def problem_of(machines: Machines, options: Options, size: int, batch: int, **changes: Any) -> Problem:
    """The problem of training a global batch in microbatches of a size, under 1f1b-flush unless `changes` say else."""
    chosen: dict[str, Any] = {
        "schedule": FLUSH,
        "accumulate": batch // size,
        "correction": "none",
        "virtual_stages": None,
    } | changes
    return Problem(sized(machines.profile, size), machines.cluster, replace(options, **chosen))


def best_of(found: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the most samples per second, or None."""
    return min(found, key=lambda one: one.sample_s, default=None)
