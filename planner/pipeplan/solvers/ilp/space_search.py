"""Searches one space of plans with the integer program: raises the upper bound until there is a plan, and adds what the
program leaves out at first, until the plan costs what the program says.

Every program leaves out some of the constraints, so its optimum is a lower bound on the pace. If the plan that attains
it keeps to all constraints, and the evaluator's score is the same, the plan is optimal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.plan.plan import Plan
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.constraints.cards import Boundary, refinable
from pipeplan.solvers.ilp.constraints.charged import Charges
from pipeplan.solvers.ilp.constraints.depth import TooManyChoicesError
from pipeplan.solvers.ilp.constraints.pipeline_model import PipelineModel
from pipeplan.solvers.ilp.enumeration.choices import Choices, choices_within
from pipeplan.solvers.ilp.enumeration.place_table import PlaceTable
from pipeplan.solvers.ilp.facts.placement_facts import PlacementFacts
from pipeplan.solvers.ilp.milp import backend
from pipeplan.solvers.ilp.milp.backend import MilpOutcome
from pipeplan.util.deadline import Deadline

# Relative margin above another solver's objective within which the program still searches. A bound that is too low then
# shows as an infeasible program, and one that is too high as a better plan.
CUTOFF_SLACK = 1e-6

# Upper bounds to try, relative to the lower bound; with depths the first two are left out. Beyond the last, each
# further upper bound is so many times the one before.
_RUNGS = (1.01, 1.04, 1.12, 1.3, 1.7, 2.5)
_BEYOND = 2.5

MOST_PLACED = 200_000
"""Candidate placements times layers, as far as choices leave undecided where layers start: a program with that many
variables takes about a minute to build."""

# Relative distance of the first pace above the lower bound for which it is asked whether any choice of stages makes a
# pipeline; the distance grows, and shrinks again to this.
_FIRST_STEP = 0.002
# Where another solver's objective is the upper bound, how far below it this is asked for, in turn.
_BELOW = (0.001, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95)

# Share of the time for the search of an optimal plan. If it does not suffice, the rest goes to lower bounds.
_SEARCHING = 0.75
# Paces to refute in that rest, relative to another solver's objective.
_REFUTED = (0.8, 0.9, 0.95, 0.98, 0.99)


@dataclass(frozen=True)
class IlpLimits:
    """The solver of the integer program, and when it stops."""

    seconds: float | None = None
    """Time limit; None for no limit."""
    gap: float = 0.0
    """Relative gap at which the solver may stop."""
    solver: str = "highs"
    """`highs` or `cbc`."""


@dataclass
class SpaceAnswer:
    """The result of the search of one space. Paces are in seconds per minibatch of all copies."""

    bound_s: float
    """Lower bound on the pace of every plan in the space; infinite where no plan is below the upper bound."""
    proven: bool = False
    interrupted: bool = False
    refusal: str = ""
    """The reason why the space was not searched to the end, or an empty text."""
    best: tuple[float, Plan] | None = None
    """The pace, by the program's coefficients, of the plan that is optimal, or the best when the time was up."""
    seen: tuple[float, Plan] | None = None
    """The fastest plan of all programs, by the evaluator."""
    size: tuple[int, int] = (0, 0)
    """Variables and constraints of the largest program."""


class _TooLargeError(Exception):
    """A program would have more than `MOST_PLACED` candidate placements times layers."""


class _Attempt(NamedTuple):
    """One program that was solved, or none where no stages make a pipeline."""

    model: PipelineModel | None
    outcome: MilpOutcome
    bound_s: float
    """Lower bound on the pace of all plans up to the program's upper bound."""


@dataclass
class SpaceSearch:
    """The search of one space for a plan whose pace lies between two bounds."""

    charges: Charges
    low_s: float
    high_s: float
    limits: IlpLimits
    deadline: Deadline
    is_bounded: bool
    """Whether the upper bound is another solver's objective, and so the only one to try."""
    complete: bool = False
    refined: frozenset[Boundary] = frozenset()
    answer: SpaceAnswer = field(init=False)
    _is_narrowed: bool = False
    _likely_s: float = 0.0
    """The largest pace that seems to be impossible, by a verdict that is not confirmed."""
    _table: PlaceTable | None = None
    _known: list[tuple[float, Choices]] = field(default_factory=list)
    """Choices that were found, by their pace."""

    @property
    def problem(self) -> Problem:
        """The whole problem."""
        return self.charges.problem

    def __post_init__(self) -> None:
        self.answer = SpaceAnswer(self.low_s)

    def run(self) -> SpaceAnswer:
        """Search the space."""
        self.narrow()
        while True:
            try:
                model, outcome, bound_s = self._raise_bound()
            except TooManyChoicesError as error:
                self.answer.refusal = f"the integer program would be too large with memory limits: {error}"
                return self.answer
            except _TooLargeError as error:
                self.answer.refusal = f"the integer program would be too large: {error}"
                return self.answer
            self.answer.interrupted = outcome.interrupted
            self.answer.refusal = outcome.failure
            self.low_s = self.answer.bound_s = max(self.low_s, bound_s)
            if model is None or not outcome.found:
                self.answer.proven = outcome.proven
                self._refute(outcome)
                return self.answer
            pace_s, plan = self._plan(model)
            score = evaluate(plan, self.problem)
            self._see(plan, score)
            holds = score.fits and score.pace_s <= pace_s * (1 + CUTOFF_SLACK)
            if holds or not outcome.proven or not self._add_what_is_missing(model, pace_s, score):
                self.answer.best = pace_s, plan
                self.answer.proven = outcome.proven and holds
                self._refute(outcome)
                return self.answer
            if outcome.interrupted or self.answer.refusal:
                return self.answer

    def _add_what_is_missing(self, model: PipelineModel, pace_s: float, score: Evaluation) -> bool:
        """Extend the program by what the plan with this score shows to be missing. Returns whether there is any."""
        if not self.complete and not (score.fits and score.alone_s <= pace_s * (1 + CUTOFF_SLACK)):
            self.complete = True
            return True
        found = refinable(model.chosen(), self.charges.inner.cluster)
        added, self.refined = found - self.refined, self.refined | found
        return bool(added)

    def _see(self, plan: Plan, score: Evaluation) -> None:
        """Keep a plan if it is the fastest so far. Slower ones need not be found."""
        if score.fits and (self.answer.seen is None or score.pace_s < self.answer.seen[0]):
            self.answer.seen = score.pace_s, plan
            self.high_s = min(self.high_s, score.pace_s * (1 + CUTOFF_SLACK))

    def _refute(self, outcome: MilpOutcome) -> None:
        """Raise the lower bound in the time that is left, if there was too little for a proof.

        A program whose upper bound is too low for any plan is far easier than one at the optimum.
        """
        if outcome.proven or outcome.interrupted or self.deadline.at is None:
            return
        paces = [factor * self.high_s for factor in _REFUTED] if self.is_bounded else [self._likely_s]
        for pace_s in paces:
            if self.low_s < pace_s < self.high_s and not self.deadline.passed:
                _, outcome, bound_s = self._solve_once(self.low_s, pace_s, confirm=True, share=1.0)
                self.low_s = self.answer.bound_s = max(self.low_s, min(pace_s, bound_s))
                if outcome.found or not outcome.proven:
                    return

    def _raise_bound(self) -> _Attempt:
        """The program with the smallest feasible upper bound that was tried."""
        is_feasible_checked = False
        low, high = self.low_s, self.high_s
        for threshold in self._thresholds():
            if self.complete and not self.is_bounded and threshold > low * _RUNGS[-1] and not is_feasible_checked:
                # A larger upper bound never needs more memory: first find out whether there is any plan at all.
                is_feasible_checked = True
                attempt = self._solve_once(high, high, confirm=True)
                if not attempt.outcome.found:
                    return attempt if attempt.outcome.proven else attempt._replace(bound_s=0.0)
            attempt = self._solve_once(low, threshold, confirm=threshold >= high)
            if attempt.outcome.found or not attempt.outcome.proven:
                break
            self._likely_s = max(self._likely_s, threshold)
        return attempt

    def _solve_once(self, low_s: float, high_s: float, *, confirm: bool, share: float = _SEARCHING) -> _Attempt:
        """Build the program for two bounds and run the solver on it, for a share of the time that is left."""
        choices = self._choices(high_s)
        if choices is not None and not len(choices):
            return _Attempt(None, MilpOutcome(found=False, proven=True, bound=math.inf), math.inf)
        self._refuse_size(high_s, choices)
        model = PipelineModel(
            self.charges,
            low_s,
            high_s,
            complete=self.complete,
            refined=self.refined,
            choices=choices,
            deadline=self.deadline,
        )
        self.answer.size = max(self.answer.size, model.program.size)
        limits, left = self.limits, self.deadline.left_s
        if left is not None:
            left = max(0.1, share * left)
        outcome = backend.run(model.program.lp, limits.solver, left, limits.gap, confirm=confirm)
        return _Attempt(model, outcome, outcome.bound * model.scale_s)

    def _refuse_size(self, high_s: float, choices: Choices | None) -> None:
        """Raise `_TooLargeError` if the program would take too long to build."""
        used = None if choices is None else choices.used
        facts = PlacementFacts(self.charges.inner, high_s * self.charges.scale, used)
        placements, layers = len(facts.placements.all), len(facts.layers)
        undecided = 1.0
        if choices is not None:
            always, never = choices.decided(facts.workers)
            undecided = 1.0 - float((always | never).mean())
        if placements * layers * undecided > MOST_PLACED:
            raise _TooLargeError(f"{placements} candidate placements for each of {layers} layers")

    def _choices(self, high_s: float) -> Choices | None:
        """The stages that plans with at most this pace may have; None where there are too many to look at."""
        facts = PlacementFacts(self.charges.inner, high_s * self.charges.scale)
        if self._table is None:
            self._table = PlaceTable(facts, self.charges.factors() if self.problem.options.contention else None)
        among = next((known for pace_s, known in self._known if pace_s >= high_s), None)
        found = choices_within(facts, self._table, self.deadline, among=among)
        if found is not None and len(found):
            # The choices of the least and of the largest pace are kept; a search asks for others only on its way down.
            self._known = sorted([*self._known[-1:], (high_s, found)], key=lambda known: known[0])
        return found

    def narrow(self) -> None:
        """Raise the lower bound to a pace below which no choice of stages makes a pipeline, if that is still to do."""
        if self._is_narrowed:
            return
        self._is_narrowed = True
        if not self.is_bounded or self._choices(self.high_s) is None:
            self._narrow_from_below()
            return
        high = self.high_s
        for share in _BELOW:
            pace_s = self.high_s * (1 - share)
            if pace_s <= self.low_s or not self._may_be_within(pace_s):
                break
            high = pace_s
        while self.low_s < high * (1 - _FIRST_STEP / 2):
            pace_s = math.sqrt(self.low_s * high)
            if self._may_be_within(pace_s):
                high = pace_s

    def _narrow_from_below(self) -> None:
        """Narrow in growing steps from the lower bound, where choices are too many at the upper one."""
        step, high = _FIRST_STEP, self.high_s
        while self.low_s < high * (1 - _FIRST_STEP) and not self.deadline.passed:
            pace_s = min(self.low_s * (1 + step), high * (1 - _FIRST_STEP / 2))
            if self._may_be_within(pace_s):
                high, step = pace_s, step / 4
                if step < _FIRST_STEP:
                    return
            else:
                step *= 2

    def _may_be_within(self, pace_s: float) -> bool:
        """Whether choices of stages, as far as they can be looked at, make a pipeline within a pace. If none do, the
        pace is the lower bound."""
        choices = self._choices(pace_s)
        if choices is not None and not len(choices):
            self.low_s = self.answer.bound_s = max(self.low_s, pace_s)
            return False
        return True

    def _thresholds(self) -> Iterator[float]:
        """The upper bounds to try, ascending; the last is `high_s`."""
        if not self.is_bounded:
            threshold = self.low_s
            for factor in _RUNGS[2:] if self.complete else _RUNGS:
                threshold = self.low_s * factor
                if threshold < self.high_s:
                    yield threshold
            while (threshold := threshold * _BEYOND) < self.high_s:
                yield threshold
        yield self.high_s

    def _plan(self, model: PipelineModel) -> tuple[float, Plan]:
        """The pace and the plan of a solution, with depths."""
        pace_s = model.pace_s()
        plan = self.charges.space.plan(self.problem, model.stages())
        return pace_s, depths.assign_depths(plan, self.problem, pace_s * (1 + CUTOFF_SLACK / 10))
