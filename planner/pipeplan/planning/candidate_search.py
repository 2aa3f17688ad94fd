"""Searches for the candidates of a choice: each kind at its best microbatch size, the simplest kinds first.

A first search finds plans by the formulas, which are lower bounds of the figure. A second search improves these plans
by simulation (`local_search.py`). Searches of all plans of 1f1b-flush also prove bounds (`prove.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeplan.cost.formulas import ROUNDING
from pipeplan.errors import InputError, TooFewLayersError
from pipeplan.plan.learning_cost import CORRECTED_DELAY, is_helped
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSH, VIRTUAL, ZERO_BUBBLE
from pipeplan.planning.candidates import (
    CHOICE_GAP,
    Candidate,
    best_of,
    candidate_of,
    comparable,
    fastest_found,
    improved,
    least_step_s,
    like,
    simplest_of,
    stale_problems,
    under,
    virtual_candidate,
)
from pipeplan.planning.figure import TOLERANCE
from pipeplan.planning.local_search import PlanSearch
from pipeplan.planning.one_stage import one_stage_bound_s
from pipeplan.planning.prove import Bounds
from pipeplan.planning.question import ANY, Question
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline

DDP, ZERO_1, FSDP, HSDP, ONE_SERVER, ONE_WORKER = "DDP", "ZeRO-1", "FSDP", "HSDP", "one server", "one worker"
BY_SPEED, UNIFORM, PIPELINE, STALE = "DDP by speed", "uniform pipeline", "pipeline", "old gradients"
NEARLY = 0.1
"""Pipelines within this relative distance of the fastest are tried under zb-h1 and with several stages on a worker,
which may change the order."""
LISTED_SIZES = 2
"""Largest number of microbatch sizes for which plans are listed. The sizes of the fastest candidates are taken."""


class CandidateSearch:
    """The candidates of a question found so far, and the bounds proven for all others."""

    def __init__(self, question: Question, deadline: Deadline) -> None:
        self.question, self.deadline = question, deadline
        self.found: list[Candidate] = []
        """The synchronous candidates found so far."""
        self.stale: Candidate | None = None
        """The fastest plan with old gradients found so far."""
        self.bounds = Bounds(question)
        self.finished = True
        """Whether all searches ended before their time limit."""
        self.refused: TooFewLayersError | None = None
        self._steady: list[Plan] = []
        """The best plans without a flush, from which searches with a flush start."""
        self._searches: dict[Problem, PlanSearch] = {}
        self._split: set[tuple[Problem, Plan]] = set()
        """The (problem, plan) pairs whose stages were tried under zb-h1."""

    @property
    def allowed(self) -> list[Candidate]:
        """The synchronous candidates that satisfy the user's constraints."""
        return [one for one in self.found if one.allowed]

    @property
    def fastest_s(self) -> float:
        """Seconds per sample of the fastest allowed candidate; infinite if there is none."""
        return min((one.sample_s for one in self.allowed), default=float("inf"))

    def prove(self, sizes: Sequence[int], share: float) -> None:
        """Prove bounds on the pipelines of all microbatch sizes, in a share of the time that is left."""
        self.bounds.tighten(sizes, self.fastest_s, self.deadline.share(share))

    # -- synchronous candidates --

    def data_parallelism(self, sizes: Sequence[int]) -> None:
        """Search for plans of one stage: plain, with a divided optimiser, with divided weights, on one server, on one
        worker."""
        options, cluster = self.question.options, self.question.machines.cluster
        alone: dict[str, Any] = {"stages": 1, "max_stages": None, "grid": False, "pins": ()}
        self.best_of_sizes(DDP, sizes, **alone)
        if options.sharding == Sharding.NONE and len({device.speed for device in cluster.distinct_devices}) > 1:
            self.best_of_sizes(BY_SPEED, sizes, **alone, unequal_shares=True)
        if options.sharding == Sharding.NONE and self.question.machines.profile.optimizer_elementwise:
            self.best_of_sizes(ZERO_1, sizes, **alone, sharding=Sharding.OPTIMIZER)
        self.best_of_sizes(FSDP, sizes, **alone, sharding=Sharding.FULL)
        server = max(cluster.server_sizes)
        if 1 < server < cluster.workers:
            self.best_of_sizes(HSDP, sizes, **alone, sharding=Sharding.HYBRID)
        if server < min(cluster.workers, options.max_workers or cluster.workers):
            self.best_of_sizes(ONE_SERVER, sizes, **alone | {"max_workers": server})
        machine = self.question.alone
        size = self.question.minibatch or self.question.machines.profile.minibatch
        if machine is not None and self._may_have_one_stage and self.question.samples % size == 0:
            alone |= {"max_workers": None, "pins": options.pins}
            own = replace(self.question, machines=machine, batch=self.question.samples)
            self._search(ONE_WORKER, own.problem(size, **alone))
        self._bound_one_stage(sizes, alone)

    def _bound_one_stage(self, sizes: Sequence[int], alone: Mapping[str, Any]) -> None:
        """Bound the plans of one stage with whole weights. DDP is most of these, and its plans are simulated."""
        others = (one for one in self.found if not one.sharding.divides_weights and one.kind not in (DDP, ONE_SERVER))
        bounds = [one.formula_sample_s for one in others]
        if any(one.kind == DDP for one in self.found):
            for size in sizes:
                limit_s, ends = self.fastest_s * size, self.deadline.share(0.1)
                bounds.append(one_stage_bound_s(self.question.problem(size, **alone), limit_s, ends) / size)
        self.bounds.one_stage_s = min(bounds, default=float("inf"))

    @property
    def _may_have_one_stage(self) -> bool:
        """Whether the user's constraints allow a plan of one stage."""
        options = self.question.options
        return options.stages in (None, 1) and not any(stage > 1 for _, stage in options.pins)

    def pipelines(self, sizes: Sequence[int]) -> None:
        """Search for the best uniform pipeline, the best plan of 1f1b-flush, and plans of the other synchronous
        schedules."""
        options = self.question.options
        if options.stages != 1 and not options.grid:
            self.best_of_sizes(UNIFORM, sizes, grid=True, allow_copies=False)
            # Try zb-h1 first, because the search of all cuts may take all the time that is left.
            self._zero_bubbles()
        self.best_of_sizes(PIPELINE, sizes)
        if options.grid or not self.question.simulates:
            return
        for plan in self._steady:
            # If updates are rare, the best plan without a flush is near the best plan with a flush.
            for size in self._fastest_sizes(sizes):
                self._keep(like(plan, PIPELINE, self._search_in(self.question.problem(size), 0.2)))
        self._zero_bubbles()
        for size in self._fastest_sizes(sizes):
            self._listed(size)
        self._zero_bubbles()
        self._virtual_stages()

    def all_cuts(self, sizes: Sequence[int]) -> None:
        """Search all cuts for microbatch sizes where only cuts between blocks were searched. The search proves a bound,
        and may find a faster plan."""
        for size in sizes:
            if not self.allowed or self.question.options.grid or not self.question.simulates:
                return
            try:
                problem = self.question.problem(size)
            except InputError:
                continue
            bound = self.bounds.searched.get(size, 0.0)
            proven = max(bound, self.bounds.relaxed(size, splits=False)) * (1 + TOLERANCE) >= self.fastest_s
            if not proven and bound <= least_step_s(problem) / size * (1 + ROUNDING):
                self._search(PIPELINE, problem, self.fastest_s, gap=0.0)

    def best_of_sizes(self, kind: str, sizes: Sequence[int], **changes: Any) -> None:
        """Find the best candidate of a kind among microbatch sizes; `changes` are changes of the user's options."""
        best_sample_s = float("inf")
        for size in sizes:
            try:
                problem = self.question.problem(size, **changes)
            except TooFewLayersError as error:
                self.refused = error
                return
            except InputError:
                if changes:
                    return  # The options of this kind contradict the user's.
                raise
            useful_sample_s = best_sample_s
            if kind == PIPELINE and self.allowed:
                # A plan that is slower under 1f1b-flush may be the fastest under zb-h1.
                alike = [one.sample_s for one in self.allowed if one.kind != ZERO_BUBBLE]
                useful_sample_s = min(useful_sample_s, *alike)
                if self.bounds.relaxed(size, splits=True) >= useful_sample_s:
                    self.bounds.learn(size, useful_sample_s)
                    continue
            self._search(kind, problem, useful_sample_s)
            best_sample_s = min((one.sample_s for one in self.found if one.kind == kind), default=best_sample_s)

    def _search(
        self, kind: str, problem: Problem, useful_sample_s: float = float("inf"), *, gap: float = CHOICE_GAP
    ) -> None:
        """Find a problem's best plan if it takes less than `useful_sample_s` seconds per sample, and keep it.

        The problem of a `PIPELINE` contains all plans of 1f1b-flush, so its search proves a bound on them.
        """
        question, size, ends = self.question, problem.profile.minibatch, self.deadline.share(0.4)
        one, bound_s = candidate_of(
            kind,
            problem,
            question.maximum_cuts,
            ends,
            useful_sample_s * size,
            simulates=question.simulates,
            gap=gap,
        )
        self.finished = self.finished and not ends.passed
        if one is not None and self._may_be_compared(one):
            # Keep the candidate first, so that it is not lost if Ctrl-C comes during the improvement.
            self._keep([one])
            self.found[-1] = improved(self.found[-1], self._search_in(problem, 0.4))
            bound_s = min(bound_s, self.found[-1].figure.step_s)
        if kind == PIPELINE:
            self.bounds.learn(size, bound_s / size)

    def _may_be_compared(self, one: Candidate) -> bool:
        """Whether a candidate was simulated if other pipelines were. Otherwise its formula, a lower bound, would win
        against their figures."""
        pipelines = [other for other in self.allowed if len(other.plan.stages) > 1]
        others = any(other.figure.simulated_s is not None for other in pipelines)
        return len(one.plan.stages) == 1 or one.figure.simulated_s is not None or not others

    def _zero_bubbles(self) -> None:
        """Try zb-h1 with the stages of the fastest pipeline of each kind and size, if it is nearly the fastest of
        all."""
        pipelines = [one for one in self.allowed if one.kind in (PIPELINE, UNIFORM)]
        if not (pipelines and self.question.simulates):
            return
        fastest: dict[tuple[str, int], Candidate] = {}
        for one in sorted(pipelines, key=lambda one: one.sample_s):
            fastest.setdefault((one.kind, one.problem.profile.minibatch), one)
        starts = [*fastest.values(), simplest_of(pipelines)]
        for start in starts:
            near = start.sample_s <= starts[0].sample_s * (1 + NEARLY)
            problem = under(ZERO_BUBBLE, start)
            if near and problem is not None and (start.problem, start.plan) not in self._split:
                self._split.add((start.problem, start.plan))
                found = like(start.plan, ZERO_BUBBLE, self._search_in(problem, 0.2))
                self._keep([one for one in found if comparable(one, start)])

    def _listed(self, size: int) -> None:
        """Search the listed plans: uniform pipelines on unequal servers, and plans by numbers of stages and workers."""
        for kind, schedule in ((UNIFORM, FLUSH), (PIPELINE, FLUSH), (ZERO_BUBBLE, ZERO_BUBBLE)):
            try:
                problem = self.question.problem(size, schedule=schedule)
            except InputError:
                return
            limit_s = self.fastest_s * size * (1 + TOLERANCE)
            search = self._search_in(problem, 0.3)
            try:
                search.uniform(limit_s) if kind == UNIFORM else search.listed(limit_s)
            finally:
                self._keep(fastest_found(kind, search))

    def _virtual_stages(self) -> None:
        """Search plans of interleaved-1f1b and zb-v for the microbatch size of the fastest pipeline, with their own
        cuts."""
        start = best_of([one for one in self.allowed if len(one.plan.stages) > 1])
        if start is None or start.sample_s > self.fastest_s * (1 + NEARLY):
            return
        for schedule in VIRTUAL:
            try:
                problem = self.question.problem(start.problem.profile.minibatch, schedule=schedule)
            except InputError:
                return
            useful_s = self.fastest_s * problem.profile.minibatch
            one = virtual_candidate(problem, self.deadline.share(0.4), useful_s)
            self._keep([one] if one is not None and comparable(one, start) else [])

    def _search_in(self, problem: Problem, share: float) -> PlanSearch:
        """The search by simulation among the plans of a problem, with a share of the time that is left."""
        search = self._searches.setdefault(problem, PlanSearch(problem))
        return search.begun(self.deadline.share(share))

    def _keep(self, found: Sequence[Candidate]) -> None:
        """Keep synchronous candidates, and note whether each is extrapolated and whether it is allowed."""
        extrapolated = self.question.sizes[1]
        for one in found:
            allowed = len(one.plan.stages) > 1 or self._may_have_one_stage
            beyond = one.problem.profile.minibatch in extrapolated
            self.found.append(replace(one, allowed=allowed, extrapolated=beyond))

    def _fastest_sizes(self, sizes: Sequence[int]) -> list[int]:
        """The few microbatch sizes of the fastest candidates, fastest first; the first given sizes if there is no
        candidate."""
        fastest_first = sorted(self.allowed, key=lambda one: one.sample_s)
        found = dict.fromkeys(one.problem.profile.minibatch for one in fastest_first)
        return ([size for size in found if size in sizes] or list(sizes))[:LISTED_SIZES]

    # -- old gradients --

    def old_gradients(self) -> None:
        """Search for the fastest plan with old gradients, up to the allowed delay.

        If no delay is allowed, gradients may have any age, so that the answer can say what old gradients would gain."""
        tolerated = self.question.staleness if self.question.staleness > 0 else ANY
        profile = self.question.machines.profile
        corrects = is_helped(profile.optimizer_name, profile.optimizer_state_ratio)
        for problem in stale_problems(self.question, tolerated):
            known = [] if self.stale is None else [self.stale]
            one = self._stale_plan(problem, min([self.fastest_s, *(stale.sample_s for stale in known)]))
            if one is None:
                continue
            if len(one.plan.stages) > 1 and one.plan.copies == 1:
                self._steady.append(one.plan)
            if not 0 < one.delay <= tolerated or best_of([*known, one]) is not one:
                continue
            if corrects and one.delay <= CORRECTED_DELAY:
                # If memory is too small for a correction, the plan has none.
                corrected = replace(problem, options=replace(problem.options, correction="ef"))
                one = self._stale_plan(corrected, float("inf")) or one
            self.stale = best_of([*known, one])

    def _stale_plan(self, problem: Problem, useful_sample_s: float) -> Candidate | None:
        useful_s, cuts, ends = useful_sample_s * problem.profile.minibatch, self.question.maximum_cuts, 0.4
        shared = self.deadline.share(ends)
        one = candidate_of(STALE, problem, cuts, shared, useful_s, simulates=self.question.simulates)[0]
        return None if one is None else improved(one, self._search_in(problem, ends))
