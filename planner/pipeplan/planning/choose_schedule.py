"""`--schedule auto`: the fastest schedule for a global batch, among those that a tolerance of staleness allows.

    none      synchronous: the pipeline drains before every update (gpipe, 1f1b-flush); the best plan of 1f1b-flush is
              then simulated beside zb-h1, interleaved-1f1b and zb-v
    bounded   additionally 2bw: weights are one update old, at every stage
    any       additionally vertical-sync and 1f1b-stashing: weights are as many updates old as minibatches are in
              flight, and a stage updates after as many minibatches as it has replicas, regardless of the global batch

Schedules with one update per global batch may cut it into minibatches of several sizes: the profile's own, and that
halved as often as the result divides the batch. Sizes that a profile neither holds nor interpolates have pessimistic
times (`pipeplan.profile_data.rescale`); they are marked, and taken only if nothing else has a plan. A correction of
old gradients applies to the schedules that a plan may correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError, InputError, NotFoundInTimeError, TooFewLayersError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, CORRECTED, DOUBLE_BUFFERED, FLUSH, GPIPE, STASHING, VERTICAL
from pipeplan.planning.compare_flushes import compare_flushes, taken
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.stated.choose import stated_plan_s
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.rescale import halved
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan.util.text import did_you_mean

STALENESS = {
    "none": (FLUSH, GPIPE),
    "bounded": (FLUSH, GPIPE, DOUBLE_BUFFERED),
    "any": (FLUSH, GPIPE, DOUBLE_BUFFERED, VERTICAL, STASHING),
}
TAKEN = "simulated, taken"
"""The beginning of the note on a schedule that is taken by its simulation."""
EXTRAPOLATED = " (extrapolated)"
"""The mark of a minibatch size that a profile neither holds nor interpolates."""

# Of models with many cuts, plans within this gap of the best of their schedule are enough to choose among schedules.
_CHOICE_GAP = 0.01


@dataclass(frozen=True)
class ScheduleChoice:
    """The best plan of one schedule with one minibatch size."""

    problem: Problem
    sample_s: float | None
    """Seconds per sample; None if no plan fits."""
    config: str
    in_time: bool = True
    """Whether there was time enough to find a plan, or that there is none."""
    extrapolated: bool = False
    """Whether the profile has no times for this minibatch size, nor for a smaller and a larger one."""
    plan: Plan | None = None
    """The plan; None if none fits."""
    note: str = ""
    """How it compares with 1f1b-flush, for schedules that were compared by simulation."""

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return self.problem.options.schedule

    @property
    def minibatch(self) -> int:
        """Samples in one minibatch."""
        return self.problem.profile.minibatch


def choose_schedule(
    profile: Profile,
    cluster: Cluster,
    options: Options,
    batch: int,
    staleness: str,
    maximum_cuts: int,
    deadline: Deadline = NO_DEADLINE,
    *,
    simulate: bool = True,
) -> tuple[Problem, list[ScheduleChoice]]:
    """The problem with the best schedule, and all choices that were tried, best first; extrapolated sizes come last.

    Schedules are compared by the stated paces of their best plans, or without `simulate` by the formulas.

    `batch` is in samples per update. Among equally fast schedules the least stale one is taken. The choices share the
    time until the deadline. Raises `InputError` if the batch cannot be cut into minibatches, and `InfeasibleError` if
    no schedule has a plan. Models of many layers are compared by plans within 1% of the best.
    """
    check_staleness(staleness)
    sizes = minibatch_sizes(profile.minibatch, batch)
    own, known = [profile.minibatch], known_sizes(profile, sizes)[0]
    tried = [(name, size) for name in STALENESS[staleness] for size in (sizes if name in ACCUMULATING else own)]
    choices: list[ScheduleChoice] = []
    refused = None
    for number, (schedule, size) in enumerate(tried):
        accumulate = batch // size if schedule in ACCUMULATING else None
        sized = profile if size == profile.minibatch else profile.rescaled(size, pessimistic=True)
        correction = options.correction if schedule in CORRECTED else "none"
        chosen = replace(options, schedule=schedule, accumulate=accumulate, correction=correction)
        try:
            problem = Problem(sized, cluster, chosen)
        except TooFewLayersError as error:
            refused = error  # Another schedule may divide layers that share weights.
            continue
        ends = deadline.share(1 / (len(tried) - number + (staleness == "none")))
        best_found, in_time = best_in_time(problem, maximum_cuts, ends, _CHOICE_GAP)
        pace, config, plan = None, "", None
        if best_found is not None:
            plan, config, score = best_found.plan, best_found.plan.config, evaluate(best_found.plan, problem)
            pace = (stated_plan_s(problem, plan, score, ends) if simulate else score.pace_s) / size
        choices.append(ScheduleChoice(problem, pace, config, in_time, size not in {*own, *known}, plan))
    if refused is not None and not choices:
        raise refused
    feasible = [choice for choice in choices if choice.sample_s is not None]
    if not feasible and not all(choice.in_time for choice in choices):
        raise NotFoundInTimeError("no plan of any schedule was found in time; give more with --time-limit")
    if not feasible:
        raise InfeasibleError(f"no schedule has a plan that fits: tried {', '.join(STALENESS[staleness])}")
    feasible = [choice for choice in feasible if not choice.extrapolated] or feasible
    least = min(choice.sample_s for choice in feasible if choice.sample_s is not None)
    best = next(choice for choice in feasible if choice.sample_s is not None and choice.sample_s <= least * (1 + 1e-9))
    simulated = simulated_choices(best, deadline) if staleness == "none" and simulate else []
    choices.sort(key=lambda one: (one.sample_s is None, one.extrapolated, one.sample_s or 0.0))
    best = next((one for one in simulated if one.note.startswith(TAKEN)), best)
    return best.problem, [*choices, *simulated]


def check_staleness(staleness: str) -> None:
    """Raise an `InputError` unless it is a tolerance of `STALENESS`."""
    if staleness not in STALENESS:
        raise InputError(f"there is no tolerance {staleness!r} for staleness; {did_you_mean(staleness, STALENESS)}")


def simulated_choices(best: ScheduleChoice, deadline: Deadline) -> list[ScheduleChoice]:
    """The other synchronous schedules beside the best plan of 1f1b-flush, by simulation; [] where it is another's."""
    if best.plan is None or best.schedule != FLUSH:
        return []
    compared = compare_flushes(best.problem, best.plan, deadline)
    winner = taken(compared)
    return [
        ScheduleChoice(
            one.problem,
            one.pace_s / best.minibatch,
            one.plan.config,
            extrapolated=best.extrapolated,
            plan=one.plan,
            note=(TAKEN if one is winner else "simulated") + ("" if number == 0 else f", {one.text(compared[0])}"),
        )
        for number, one in enumerate(compared)
    ]


def known_sizes(profile: Profile, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The sizes that a profile holds or interpolates, and the other sizes."""
    measured = [size.minibatch for size in profile.all_sizes]
    known = [size for size in sizes if measured[0] <= size <= measured[-1]]
    return known, [size for size in sizes if size not in known]


def minibatch_sizes(own: int, batch: int) -> list[int]:
    """The profile's minibatch size and its halvings, as far as they divide the batch, largest first."""
    dividing = [size for size in halved(own) if batch % size == 0]
    if batch < 1 or not dividing:
        raise InputError(
            f"a batch of {batch} samples cannot be cut into minibatches of the profile's {own} or halves of it: "
            "give --batch a multiple, or --minibatch another size"
        )
    return dividing
