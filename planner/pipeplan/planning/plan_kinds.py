"""The kinds of plans that `--schedule best` compares, and the search for the fastest plan of a kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost import contention
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import TooFewLayersError
from pipeplan.plan.learning_cost import KnownLearning, known_learning
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import DOUBLE_BUFFERED, FLUSH, FLUSHING, STASHING
from pipeplan.plan.updates import Updates
from pipeplan.planning.choose_schedule import EXTRAPOLATED, known_sizes, minibatch_sizes
from pipeplan.planning.fast import USEFUL, ScoredPlan, best_in_time, best_of_known
from pipeplan.planning.stated.choose import NEAR, choose_by_simulation
from pipeplan.planning.stated.pace import simulated
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import Deadline
from pipeplan.util.units import show_pace

CORRECTED_TEXT = " Error feedback corrects them."


@dataclass(frozen=True)
class Candidate:
    """The fastest plan of one kind."""

    problem: Problem
    plan: Plan
    pace_s: float
    """Seconds per minibatch, as it is stated: simulated where that differs from the formulas."""
    extrapolated: bool = False
    """Whether the profile has no times for this minibatch size, nor for a smaller and a larger one."""
    formulas_s: float = 0.0
    """Seconds per minibatch by the formulas."""

    @property
    def sample_s(self) -> float:
        """Seconds per sample."""
        return self.pace_s / self.problem.profile.minibatch

    @property
    def updates(self) -> Updates:
        """How old its gradients are, and what its updates average over."""
        return Updates.of(self.plan, self.problem.profile.minibatch)

    @property
    def learning(self) -> KnownLearning | None:
        """The measured cost of learning with gradients as old as this plan's; None if none of them is old."""
        profile, correction = self.problem.profile, self.problem.options.correction
        return known_learning(self.plan, profile.optimizer_name, profile.optimizer_state_ratio, correction)

    @property
    def learning_optimizer(self) -> str:
        """The optimiser under whose name learning was measured, or that of the profile."""
        return self.problem.profile.optimizer_name if self.learning is None else self.learning.optimizer

    @property
    def cost(self) -> float | None:
        """Samples to the goal beside those of a synchronous plan; None where that is not measured.

        It is at least 1: a figure below that is within the spread of the seeds, and old gradients earn no credit.
        """
        if self.learning is None:
            return 1.0
        return None if self.learning.cost is None else max(1.0, self.learning.cost)

    @property
    def goal_sample_s(self) -> float | None:
        """Seconds per sample, times the cost: what is ranked by time to the goal; None where it is not measured."""
        return None if self.cost is None else self.sample_s * self.cost

    def goal_json(self) -> dict[str, Any]:
        """The fields that plan.json holds for it beside the others where plans are ranked by time to the goal."""
        learning = None if self.learning is None else self.learning.to_json()
        return {"goal_cost": self.cost, "goal_sample_s": self.goal_sample_s, "learning": learning}

    @property
    def text(self) -> str:
        """One line for people."""
        size = f"minibatch {self.problem.profile.minibatch}{EXTRAPOLATED if self.extrapolated else ''}"
        corrected = "" if self.problem.options.correction == "none" else CORRECTED_TEXT
        return f"{self.plan.config}, {size}: {show_pace(1 / self.sample_s)} samples/s. {self.updates.text}{corrected}"

    def to_json(self) -> dict[str, Any]:
        """The fields that plan.json holds for it."""
        return {
            "config": self.plan.config,
            "schedule": self.plan.schedule,
            "accumulate": self.plan.accumulate,
            "minibatch": self.problem.profile.minibatch,
            "minibatch_s": self.pace_s,
            "formulas_s": self.formulas_s,
            "extrapolated": self.extrapolated,
            "correction": self.problem.options.correction,
            "updates": self.updates.to_json(),
        }


@dataclass(frozen=True)
class PlanKinds:
    """The problems of each kind of plan, and the search for the fastest plan of a kind."""

    profile: Profile
    cluster: Cluster
    options: Options
    samples: int
    """Samples per update of the plans that have one for all stages."""
    maximum_cuts: int
    corrects: bool = False
    """Whether asynchronous plans are corrected if gradients are not too old."""
    simulates: bool = True
    """Whether plans are compared by their stated paces, and otherwise by the formulas."""
    found: list[Candidate] = field(default_factory=list)
    """All plans found so far."""
    unfinished: list[Problem] = field(default_factory=list)
    """The problems whose searches did not come to their end."""
    undivided: list[str] = field(default_factory=list)
    """The schedules under which the layers cannot be divided into the stages that are asked for."""

    def asynchronous(self, staleness: str) -> Iterator[tuple[Problem, bool]]:
        """The problems whose plans may be asynchronous; none where staleness is ruled out, or where layers that share
        weights leave too few groups for the stages that are asked for."""
        try:
            if staleness == "any":
                yield self._problem(self.profile, schedule=STASHING, accumulate=None), False
            elif staleness == "bounded" and self.samples % self.profile.minibatch == 0:
                count = self.samples // self.profile.minibatch
                yield self._problem(self.profile, schedule=DOUBLE_BUFFERED, accumulate=count), False
        except TooFewLayersError:
            self.undivided.append(STASHING if staleness == "any" else DOUBLE_BUFFERED)

    def buffered(self) -> Iterator[tuple[Problem, bool]]:
        """The problems of 2BW with the samples per update that are asked for, in minibatches of measured sizes."""
        known, _ = known_sizes(self.profile, minibatch_sizes(self.profile.minibatch, self.samples))
        for size in known:
            sized = self.profile if size == self.profile.minibatch else self.profile.rescaled(size, pessimistic=True)
            yield self._problem(sized, schedule=DOUBLE_BUFFERED, accumulate=self.samples // size), False

    def corrected(self, candidate: Candidate, correction: str = "ef") -> Iterator[tuple[Problem, bool]]:
        """The problem of an asynchronous candidate, with this correction of its updates."""
        options = replace(candidate.problem.options, correction=correction)
        yield replace(candidate.problem, options=options), candidate.extrapolated

    def data_parallel(self) -> Iterator[tuple[Problem, bool]]:
        """Data parallelism with the profile's minibatch; none where there must be several stages."""
        if self.options.stages in (None, 1) and not any(stage > 1 for _, stage in self.options.pins):
            alone = {"stages": 1, "max_stages": None}
            yield self._problem(self.profile, schedule=STASHING, accumulate=None, correction="none", **alone), False

    def flushing(self, sizes: Sequence[int], *, extrapolated: bool = False) -> Iterator[tuple[Problem, bool]]:
        """Pipelines that drain, with minibatches of these sizes, and whether the times are extrapolated."""
        for size in sizes:
            sized = self.profile if size == self.profile.minibatch else self.profile.rescaled(size, pessimistic=True)
            count = self.samples // size
            yield self._problem(sized, schedule=FLUSH, accumulate=count, correction="none"), extrapolated

    def best(
        self,
        problems: Iterable[tuple[Problem, bool]],
        deadline: Deadline,
        useful_sample_s: float = float("inf"),
        *,
        stated: bool = True,
    ) -> Candidate | None:
        """The fastest plan of these problems, or of those for which there was time.

        None if there is none that takes less than `useful_sample_s` seconds for a sample. Its pace is the stated one,
        or where that is not asked for that of the formulas.
        """
        before = len(self.found)
        for problem, extrapolated in problems:
            limit_s = min((one.sample_s for one in self.found[before:]), default=useful_sample_s)
            limit_s *= problem.profile.minibatch
            # A plan that is a little too slow by the formulas of a flush may be fast enough in the simulation.
            useful_s = limit_s * (1 + NEAR * (self.simulates and problem.options.schedule in FLUSHING))
            if _least_pace_s(problem) >= useful_s:
                continue
            # Plans of other kinds have stages that may do well here, too.
            known = best_of_known((one.plan for one in self.found), problem)
            enough_s = useful_s if known is None else min(useful_s, known.pace_s * USEFUL)
            found, in_time = best_in_time(problem, self.maximum_cuts, deadline.share(0.5), useful_s=enough_s)
            self.unfinished.extend([] if in_time else [problem])
            best = min((one for one in (found, known) if one is not None), key=lambda one: one.pace_s, default=None)
            if best is not None and best.pace_s < useful_s:
                stated_s = self._stated_s(best, problem, deadline) if stated else best.pace_s
                if stated_s < limit_s:
                    self.found.append(Candidate(problem, best.plan, stated_s, extrapolated, best.pace_s))
        return min(self.found[before:], key=lambda one: one.sample_s, default=None)

    def _stated_s(self, one: ScoredPlan, problem: Problem, deadline: Deadline) -> float:
        """The stated pace of a plan, as it is, in seconds per minibatch."""
        if not self.simulates:
            return one.pace_s
        return simulated("", one.plan, evaluate(one.plan, problem), problem, deadline).stated_s

    def as_answered(self, candidate: Candidate, deadline: Deadline) -> Candidate:
        """The candidate as a solve would answer it: at the depths that are best in the simulation, with their pace."""
        if not self.simulates:
            return candidate
        problem, score = candidate.problem, evaluate(candidate.plan, candidate.problem)
        plan, score, told = choose_by_simulation(problem, candidate.plan, score, [], None, deadline)
        answered = replace(candidate, plan=plan, pace_s=told.pace_s(score.pace_s), formulas_s=score.pace_s)
        self.found.append(answered)
        return answered

    def _problem(self, profile: Profile, **changes: Any) -> Problem:
        return Problem(profile, self.cluster, replace(self.options, **changes))


def _least_pace_s(problem: Problem) -> float:
    """A pace that no plan beats: all work on all workers, or on the cores that they share."""
    return max(problem.work_s / problem.cluster.total_speed, contention.least_pace_of_shared_cores_s(problem))
