"""Chooses the plan of an answer: one question, one figure, one tolerance.

The question consists of a model, a cluster, a global batch, the allowed age of gradients, and constraints. Every
candidate trains that global batch in each update. The candidates are

    DDP               the whole model on every worker
    DDP by speed      DDP, where workers of unequal speed take unequal shares of the batch
    ZeRO-1            DDP, with the optimiser's state divided among the replicas
    FSDP              ZeRO-1, with weights and gradients divided too, and gathered unit by unit
    HSDP              FSDP inside every server; the servers are replicas
    one server        the best plan on the workers of one server
    one worker        the whole model on one worker, on a machine whose workers share its cores
    uniform pipeline  the same number of replicas in every stage
    pipeline          any plan of 1f1b-flush, and of zb-h1, interleaved-1f1b and zb-v where these are faster

Each candidate has its own best microbatch size, recomputation and depth. Candidates are compared by their figure, the
simulated time of the schedule. The simplest candidate within 3% of the fastest is taken (`candidates.py`).

Plans of 1f1b-stashing and 2bw have old gradients. They are candidates only up to the delay that the question allows,
and are taken only if they are more than 3% faster. The best plan with old gradients is always searched for, so that the
answer can say what old gradients would gain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeplan.errors import NO_PLAN_IN_TIME, InfeasibleError, NotFoundInTimeError
from pipeplan.plan.schedules import FLUSH, ZERO_BUBBLE
from pipeplan.planning.candidate_search import DDP, PIPELINE, CandidateSearch
from pipeplan.planning.candidates import Candidate, best_of, simplest_of, with_rounded_gradients
from pipeplan.planning.figure import TOLERANCE
from pipeplan.planning.prove import Proven
from pipeplan.planning.question import ANY, Question
from pipeplan.util.deadline import NO_DEADLINE, Deadline


@dataclass(frozen=True)
class Choice:
    """The candidates of a question, and the candidate that is taken."""

    samples: int
    """The global batch in samples."""
    assumed: bool
    """Whether the user left the global batch open."""
    staleness: float
    taken: Candidate
    rivals: tuple[Candidate, ...]
    """The best synchronous candidate of every kind. If the plan that is taken is synchronous, it represents its
    kind."""
    stale: Candidate | None
    """The fastest plan with old gradients, if it is faster than all synchronous candidates by more than the tolerance;
    else None."""
    rounded: Candidate | None
    """DDP with gradients in bfloat16, if it is faster than the plan that is taken by more than the tolerance; else
    None. Rounded gradients change the training, so this plan is never taken."""
    widest: Candidate | None
    """The fastest synchronous plan on the most workers that was found."""
    proven: Proven
    searched_all: bool
    """Whether the problem of the plan that is taken contains all plans of its schedule and microbatch size."""
    finished: bool
    """Whether all searches ended before the time limit."""
    interrupted: bool = False
    """Whether Ctrl-C ended the searches."""

    def bound_s(self, solved_s: float) -> float:
        """Lower bound on every plan of the question, in seconds per microbatch of the taken plan's size.

        `solved_s` is the bound that the solvers have proven for the problem of the taken plan. That problem may be only
        a part of the question: one stage, another schedule, one microbatch size. If the taken plan has old gradients,
        the bound covers only its schedule. If the taken plan runs zb-h1, the bound covers zb-h1 and 1f1b-flush.
        """
        size, schedule = self.taken.problem.profile.minibatch, self.taken.problem.options.schedule
        if self.taken.delay > 0:
            return min(solved_s, self.proven.divided_s * size)
        return self.proven.step_s(size, solved_s, splits=schedule == ZERO_BUBBLE, solved_all=self.searched_all)

    def rival(self, kind: str) -> Candidate | None:
        """The best candidate of a kind; None if it does not fit or was not searched for."""
        return next((one for one in self.rivals if one.kind == kind), None)

    def to_json(self) -> dict[str, Any]:
        """The field `choice` of plan.json."""
        return {
            "batch": self.samples,
            "assumed": self.assumed,
            "staleness": None if self.staleness == ANY else self.staleness,
            "taken": self.taken.kind,
            "rivals": [one.to_json() for one in self.rivals],
            "stale": None if self.stale is None else self.stale.to_json(),
            "rounded": None if self.rounded is None else self.rounded.to_json(),
            "bound_sample_s": self.proven.sample_s,
            "finished": self.finished,
        }


def choose(question: Question, deadline: Deadline = NO_DEADLINE) -> Choice:
    """Choose the plan that answers a question.

    After Ctrl-C the choice is among the candidates found so far. Raises `InputError` for a batch that cannot be cut
    into microbatches, `InfeasibleError` if no candidate fits, and `NotFoundInTimeError` if none was found in time.
    """
    search, interrupted = CandidateSearch(question, deadline), False
    try:
        _find_candidates(search)
    except KeyboardInterrupt:
        search.finished, interrupted = False, True
        if not search.allowed and search.stale is None:
            raise KeyboardInterrupt("no plan was found until then") from None
    taken = _taken(search)
    listed = (one.sample_s for one in search.allowed if one.problem.options.is_listed)
    most = max((one.plan.busy for one in search.allowed), default=0)
    options = taken.problem.options
    alike = replace(options, schedule=FLUSH) if options.schedule == ZERO_BUBBLE else options
    return Choice(
        samples=question.samples,
        assumed=question.batch is None,
        staleness=question.staleness,
        taken=taken,
        rivals=_rivals(search, taken),
        stale=search.stale if _stale_gains(search) else None,
        rounded=_rounded(search, taken),
        widest=best_of([one for one in search.allowed if one.plan.busy == most]),
        proven=search.bounds.proven(search.fastest_s, min(listed, default=float("inf"))),
        searched_all=alike == question.problem(taken.problem.profile.minibatch).options,
        finished=search.finished,
        interrupted=interrupted,
    )


def _find_candidates(search: CandidateSearch) -> None:
    """Search for all candidates, the simplest first, so that later searches have a figure to beat."""
    known, extrapolated = search.question.sizes
    search.data_parallelism(known)
    search.old_gradients()
    finished, search.finished = search.finished, True
    search.prove(known, 0.12)
    search.pipelines(known)
    search.all_cuts(known)
    search.prove(known, 0.9)
    if not search.finished and not search.deadline.passed:
        # Some searches were cut off. They run again with the time that the others did not need.
        search.finished = True
        search.best_of_sizes(PIPELINE, known)
    search.finished = search.finished and finished
    if not search.allowed:
        search.data_parallelism(extrapolated)
        search.pipelines(extrapolated)


def _taken(search: CandidateSearch) -> Candidate:
    """The plan with old gradients if they are allowed and faster, else the simplest synchronous candidate.

    Raises `InfeasibleError` if there is neither.
    """
    stale = search.stale
    if stale is not None and stale.delay <= search.question.staleness and _stale_gains(search):
        return stale
    if search.allowed:
        return simplest_of(search.allowed)
    if search.refused is not None:
        raise search.refused
    raise InfeasibleError("no plan fits in memory") if search.finished else NotFoundInTimeError(NO_PLAN_IN_TIME)


def _stale_gains(search: CandidateSearch) -> bool:
    """Whether old gradients make training faster by more than the tolerance."""
    return search.stale is not None and search.stale.sample_s * (1 + TOLERANCE) < search.fastest_s


def _rivals(search: CandidateSearch, taken: Candidate) -> tuple[Candidate, ...]:
    """The best synchronous candidate of every kind.

    The taken plan represents its kind, although another candidate of that kind may be faster within the tolerance."""
    fastest: dict[str, Candidate] = {}
    for one in search.found:
        best = fastest.setdefault(one.kind, one)
        fastest[one.kind] = taken if one.kind == taken.kind else min(best, one, key=lambda one: one.sample_s)
    return tuple(fastest.values())


def _rounded(search: CandidateSearch, taken: Candidate) -> Candidate | None:
    """DDP with gradients in bfloat16, if it is faster than the plan that is taken by more than the tolerance."""
    whole = best_of([one for one in search.allowed if one.kind == DDP and one.plan.busy > 1])
    if whole is None:
        return None
    rounded = with_rounded_gradients(whole, search.deadline)
    return rounded if rounded.sample_s * (1 + TOLERANCE) < taken.sample_s else None
