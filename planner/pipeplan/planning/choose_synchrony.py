"""`--schedule best`: the synchronous plan, unless an asynchronous one is faster by more than a given gain.

Two candidates are compared by samples per second, at the pace that an answer would state for them: the fastest
synchronous plan and the fastest asynchronous one, which are searched for by the formulas. The synchronous ones are data
parallelism, which is a plan of one stage, and pipelines that drain for every update (`1f1b-flush`), with the batch of
data parallelism on all workers unless another is given. A pipeline that drains has to gain a few percent over data
parallelism (`simplest.LEAST_GAIN`). The asynchronous ones are those of `1f1b-stashing`, which update after as many
minibatches as a stage has replicas, or of `2bw` with the same batch where staleness is to be bounded, or where a stage
would otherwise update less often than the given batch asks.

With the objective `time-to-goal` asynchronous plans are ranked by seconds per sample times their measured cost in
samples (`pipeplan.plan.learning_cost`). Where nothing is measured the choice falls back to the rate, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError, InputError, NotFoundInTimeError
from pipeplan.plan.learning_cost import CORRECTED_DELAY, is_helped
from pipeplan.plan.updates import MOST_STALE
from pipeplan.planning.choose_schedule import check_staleness, known_sizes, minibatch_sizes
from pipeplan.planning.plan_kinds import Candidate, PlanKinds
from pipeplan.planning.simplest import LEAST_GAIN
from pipeplan.problem.options import Options
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan.util.text import did_you_mean

BEST: Literal["best"] = "best"
"""The schedule of the synchronous plan, unless an asynchronous one is faster by a given gain."""
GAIN = 0.1
"""The gain, relative to the synchronous plan's samples per second, below which an asynchronous plan is not taken."""


RATE, TIME_TO_GOAL = "rate", "time-to-goal"
OBJECTIVES = (RATE, TIME_TO_GOAL)
"""What plans are compared by: samples per second, or these divided by the measured cost in samples to the goal."""
HARDLY_ANY = 0.02
"""The share of the pace below which a stage is said to do hardly any work."""


@dataclass(frozen=True)
class SynchronyChoice:
    """The fastest synchronous and the fastest asynchronous plan, found by the DP alone, and which is taken."""

    synchronous: Candidate | None
    """None if no synchronous plan fits."""
    asynchronous: Candidate | None
    """None if none fits, if it was ruled out, or if the fastest plan of all is synchronous."""
    gain: float
    """The gain from which an asynchronous plan is taken."""
    taken: Candidate
    reason: str
    """Why this one, in one sentence."""
    parallel: Candidate | None = None
    """The fastest data parallelism with the profile's minibatch; None where it was not asked about, or does not fit."""
    objective: str = RATE
    """What was asked for, one of `OBJECTIVES`."""

    def to_json(self) -> dict[str, Any]:
        """The field `choice` of plan.json."""
        kinds = {"synchronous": self.synchronous, "asynchronous": self.asynchronous, "parallel": self.parallel}
        goal = self.objective == TIME_TO_GOAL
        found = {
            name: None if one is None else one.to_json() | (one.goal_json() if goal else {})
            for name, one in kinds.items()
        }
        kind = "synchronous" if self.taken is self.synchronous else "asynchronous"
        asked = {"objective": self.objective} if goal else {}
        return {"taken": kind, "asynchronous_gain": self.gain, "reason": self.reason, **asked, **found}


def choose_synchrony(
    profile: Profile,
    cluster: Cluster,
    options: Options,
    batch: int | None,
    staleness: str | None,
    gain: float,
    maximum_cuts: int,
    deadline: Deadline = NO_DEADLINE,
    *,
    may_correct: bool = False,
    objective: str = RATE,
    shown: bool = True,
    simulate: bool = True,
) -> SynchronyChoice:
    """The choice between the fastest synchronous and the fastest asynchronous plan.

    Plans are compared by their stated paces, or without `simulate` by the formulas.

    With `may_correct` the asynchronous plan is one whose updates are corrected, where that was seen to help. The
    `objective` is one of `OBJECTIVES`. Where the choice is not `shown`, only the plan that is taken has to be exact: a
    synchronous one that is too slow to be taken may be missing.

    `batch` is in samples per update of the plans that have one for all stages; None for one minibatch on each worker.
    `staleness` is a tolerance of `STALENESS`; None for asynchronous plans whose gradients are at most `MOST_STALE`
    updates old. Ctrl-C ends the comparison with what was found until then. Raises `InputError` for a batch that cannot
    be cut into minibatches, and `InfeasibleError` where nothing fits.
    """
    if staleness is not None:
        check_staleness(staleness)
    check_objective(objective)
    workers = min(cluster.workers, options.max_workers or cluster.workers)
    samples = workers * profile.minibatch if batch is None else batch
    corrects = may_correct and is_helped(profile.optimizer_name, profile.optimizer_state_ratio)
    kinds = PlanKinds(profile, cluster, options, samples, maximum_cuts, corrects, simulate)
    most_stale = MOST_STALE if staleness is None else None
    keeps_batch = batch is not None
    try:
        if objective == TIME_TO_GOAL:
            choice = _compare_goals(kinds, staleness or "any", gain, deadline, most_stale)
        else:
            choice = _compare(
                kinds, staleness or "any", gain, deadline, most_stale, keeps_batch=keeps_batch, shown=shown
            )
    except KeyboardInterrupt:
        choice = _interrupted(kinds.found, gain)
    return replace(choice, objective=objective)


def check_objective(objective: str) -> None:
    """Raise an `InputError` unless it is one of `OBJECTIVES`."""
    if objective not in OBJECTIVES:
        raise InputError(f"there is no objective {objective!r}; {did_you_mean(objective, OBJECTIVES)}")


def _compare_goals(
    kinds: PlanKinds, staleness: str, gain: float, deadline: Deadline, most_stale: int | None
) -> SynchronyChoice:
    """The choice by time to the goal, among the fastest plans of each schedule and correction."""
    choice = _compare(kinds, staleness, gain, deadline.share(0.6), most_stale)
    if choice.asynchronous is None:
        return choice
    stale = _stale_plans(kinds, choice.asynchronous, staleness, deadline)
    ranked = [
        (one.goal_sample_s, one)
        for one in stale
        if one.goal_sample_s is not None
        and not one.updates.synchronous
        and (most_stale is None or max(one.updates.stale_by) <= most_stale)
        and not _only_averages_late(one)
    ]
    if not ranked and choice.synchronous is not None and all(one.learning and one.learning.fails for one in stale):
        reason = (
            "Chosen: synchronous, because with gradients as old as those of the asynchronous plans "
            f"{choice.asynchronous.learning_optimizer} did not reach the goal in all measured runs; the default "
            "objective, rate, compares samples/s."
        )
        return replace(choice, taken=choice.synchronous, reason=reason)
    if not ranked:
        optimizer = choice.asynchronous.learning_optimizer
        reason = (
            f"{choice.reason} By the rate alone: no cost in samples to the goal is measured for {optimizer} with "
            "gradients as old as those of the plans that may be taken."
        )
        return replace(choice, reason=reason)
    goal_s, best = min(ranked, key=lambda pair: pair[0])
    cost = goal_s / best.sample_s
    if choice.synchronous is None:
        reason = "Chosen: the asynchronous plan with the least time to the goal, as no synchronous plan was found."
        return replace(choice, asynchronous=best, taken=best, reason=reason)
    found = choice.synchronous.sample_s / goal_s - 1
    enough = found >= gain
    kind, word = ("asynchronous" if enough else "synchronous"), "faster" if found >= 0 else "slower"
    reason = (
        f"Chosen: {kind}, because the best asynchronous plan reaches the goal {abs(found):.1%} {word} than the "
        f"fastest synchronous one, at {cost:.2f} x the samples as measured on small models, and {gain:.0%} is "
        "asked for (--asynchronous-gain)."
    )
    return replace(choice, asynchronous=best, taken=best if enough else choice.synchronous, reason=reason)


def _stale_plans(kinds: PlanKinds, asynchronous: Candidate, staleness: str, deadline: Deadline) -> list[Candidate]:
    """The plan, the fastest one of bounded staleness where any is allowed, and each with and without a correction."""
    stale = [asynchronous]
    if staleness == "any" and (buffered := kinds.best(kinds.asynchronous("bounded"), deadline.share(0.4))):
        stale.append(kinds.as_answered(buffered, deadline.share(0.2)))
    for one in tuple(stale):
        if kinds.corrects and one.problem.options.correction == "none":
            corrected = kinds.best(kinds.corrected(one), deadline.share(0.4))
        elif kinds.corrects:
            corrected = kinds.best(kinds.corrected(one, "none"), deadline.share(0.4))
        else:
            corrected = None
        stale += [] if corrected is None else [kinds.as_answered(corrected, deadline.share(0.2))]
    return stale


def _compare(
    kinds: PlanKinds,
    staleness: str,
    gain: float,
    deadline: Deadline,
    most_stale: int | None,
    *,
    keeps_batch: bool = False,
    shown: bool = True,
) -> SynchronyChoice:
    """The choice, after searches for the fastest plan of each kind; `most_stale`: the oldest gradients to take.

    With `keeps_batch` no asynchronous plan updates less often than after the given samples, if 2BW can help it.
    """
    # Where the choice is not shown, only a plan that may be taken has to have its stated pace, which follows below.
    asynchronous = kinds.best(kinds.asynchronous(staleness), deadline.share(0.5), stated=shown)
    kept = ""
    if asynchronous is not None and keeps_batch:
        asynchronous, kept = _keeping_batch(kinds, asynchronous, deadline)
    if asynchronous is not None and asynchronous.updates.synchronous:
        # What is fastest of all is data parallelism.
        reason = "Chosen: data parallelism, which is synchronous, is faster than any pipeline."
        return SynchronyChoice(asynchronous, None, gain, asynchronous, reason, asynchronous)
    if asynchronous is not None and kinds.corrects and max(asynchronous.updates.stale_by) <= CORRECTED_DELAY:
        # Where memory is too short for a correction, the plan goes without.
        corrected = kinds.best(kinds.corrected(asynchronous), deadline.share(0.2), stated=shown)
        asynchronous = corrected or asynchronous
    if asynchronous is not None and _may_be_taken(asynchronous, most_stale):
        asynchronous = kinds.as_answered(asynchronous, deadline.share(0.2))
    known, others = known_sizes(kinds.profile, minibatch_sizes(kinds.profile.minibatch, kinds.samples))
    parallel = kinds.best(kinds.data_parallel(), deadline.share(0.2))
    # A pipeline that drains has to gain so much over data parallelism to be taken.
    useful_sample_s = float("inf") if parallel is None else parallel.sample_s / (1 + LEAST_GAIN)
    enough = not shown and asynchronous is not None and _may_be_taken(asynchronous, most_stale)
    if enough and asynchronous is not None:
        useful_sample_s = min(useful_sample_s, asynchronous.sample_s * (1 + gain))
    synchronous = kinds.best(kinds.flushing(known), deadline, useful_sample_s) or parallel
    if synchronous is None and enough and asynchronous is not None:
        reason = "Chosen: asynchronous, as no synchronous plan is nearly as fast."
        return SynchronyChoice(None, asynchronous, gain, asynchronous, reason + kept)
    if synchronous is None:
        synchronous = kinds.best(kinds.flushing(others, extrapolated=True), deadline)
    if synchronous is not None and synchronous is not parallel:
        synchronous = kinds.as_answered(synchronous, deadline.share(0.2))
    taken = asynchronous or synchronous
    if taken is None:
        if kinds.unfinished:
            raise NotFoundInTimeError("no plan of any schedule was found in time; give more with --time-limit")
        raise InfeasibleError("no schedule has a plan that fits")
    if asynchronous is None:
        why = "asynchronous ones were ruled out" if staleness == "none" else "no asynchronous plan was found"
        if kinds.undivided:
            why = "layers that share weights leave too few to divide for an asynchronous plan of so many stages"
        reason = f"Chosen: the fastest synchronous plan, as {why}."
    elif synchronous is None:
        reason = f"Chosen: the fastest asynchronous plan, as no synchronous plan was found that fits.{kept}"
    else:
        taken, reason = _better(synchronous, asynchronous, gain, most_stale, kept)
    return SynchronyChoice(synchronous, asynchronous, gain, taken, reason, parallel)


def _keeping_batch(kinds: PlanKinds, asynchronous: Candidate, deadline: Deadline) -> tuple[Candidate, str]:
    """The asynchronous plan, or one of 2bw that updates after fewer samples, with a sentence on why it is one."""
    if max(asynchronous.updates.samples) <= kinds.samples:
        return asynchronous, ""
    buffered = kinds.best(kinds.buffered(), deadline.share(0.3))
    if buffered is None or buffered.updates.synchronous:
        return asynchronous, ""
    kept = (
        f" The asynchronous plan is one of 2bw, because with 1f1b-stashing a replicated stage would update "
        f"only every {max(asynchronous.updates.samples)} samples, and --batch asks for {kinds.samples}."
    )
    return buffered, kept


def _better(
    synchronous: Candidate, asynchronous: Candidate, gain: float, most_stale: int | None, kept: str
) -> tuple[Candidate, str]:
    """The plan to take of the fastest ones of both kinds, and why; `kept` says why the asynchronous one is of 2bw."""
    found = synchronous.sample_s / asynchronous.sample_s - 1
    if found >= gain and _only_averages_late(asynchronous):
        reason = (
            "Chosen: synchronous, because the fastest asynchronous plan is data parallelism but for a stage of "
            f"hardly any work, and is {found:.1%} faster only as its gradients are averaged late."
        )
        return synchronous, reason
    oldest = max(asynchronous.updates.stale_by)
    if found >= gain and most_stale is not None and oldest > most_stale:
        reason = (
            f"Chosen: synchronous, although the fastest asynchronous plan has {found:.1%} more samples/s, because "
            f"its gradients are up to {oldest} updates old, and beyond {most_stale} most models that were measured "
            "do not learn as well; --staleness any takes it."
        )
        return synchronous, reason
    enough = found >= gain
    kind, more = ("asynchronous" if enough else "synchronous"), "more" if found >= 0 else "fewer"
    reason = (
        f"Chosen: {kind}, because the fastest asynchronous plan has {abs(found):.1%} {more} samples/s than the "
        f"fastest synchronous one, and {gain:.0%} more is asked for (--asynchronous-gain)."
    )
    return (asynchronous if enough else synchronous), reason + kept


def _may_be_taken(candidate: Candidate, most_stale: int | None) -> bool:
    """Whether an asynchronous plan is taken if it is fast enough."""
    stale = most_stale is not None and max(candidate.updates.stale_by) > most_stale
    return not stale and not _only_averages_late(candidate)


def _only_averages_late(candidate: Candidate) -> bool:
    """Whether a plan is data parallelism but for stages that do hardly any work.

    In a pipeline of several stages a replica goes on before its all-reduce ends, which data parallelism may not. So a
    stage of a single cheap layer can make a plan faster although nothing is gained by the pipeline itself.
    """
    score = evaluate(candidate.plan, candidate.problem)
    work = sorted(stage.compute_s for stage in score.stages)
    return len(work) > 1 and work[-2] < HARDLY_ANY * score.pace_s


def _interrupted(found: Sequence[Candidate], gain: float) -> SynchronyChoice:
    """The choice among the plans that were found before Ctrl-C came. Raises `KeyboardInterrupt` if there are none."""
    if not found:
        raise KeyboardInterrupt("no plan was found until then")
    stale = [one for one in found if not one.updates.synchronous]
    drained = [one for one in found if one.updates.synchronous]
    asynchronous, synchronous = (min(kind, key=lambda one: one.sample_s, default=None) for kind in (stale, drained))
    taken = min(drained or stale, key=lambda one: one.sample_s)
    return SynchronyChoice(synchronous, asynchronous, gain, taken, "Chosen: what was found before Ctrl-C came.")
