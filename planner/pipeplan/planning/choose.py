"""Chooses the plan of an answer: one question, one figure, one tolerance.

The question is a model, a cluster, a global batch, how old gradients may be, and constraints. Every candidate trains
that global batch in each update. The candidates are

    DDP               the whole model on every worker
    DDP by speed      the same, where workers of unequal speed take unequal shares of the batch
    ZeRO-1            the same, with the optimiser's state divided among the replicas
    FSDP              the same, with weights and gradients divided too, and gathered unit by unit
    HSDP              FSDP inside every server, whose servers are replicas
    one server        the best plan on the workers of one server
    one worker        on a machine whose workers share its cores
    uniform pipeline  the same number of replicas in every stage
    pipeline          any plan of 1f1b-flush, and of zb-h1, interleaved-1f1b and zb-v where these are faster

each with its own best microbatch size, recomputation and depth. They are compared by their figure, the simulated time
of the schedule (`figure.py`). The simplest one within 3% of the fastest is taken (`figure.py`).

Plans with old gradients, of 1f1b-stashing and 2bw, are candidates only up to the delay that the question allows, and
are taken only if they are more than 3% faster. The best of them is found in any case, so that the answer can say what
it would gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeplan.cost.formulas import ROUNDING
from pipeplan.errors import NO_PLAN_IN_TIME, InfeasibleError, InputError, NotFoundInTimeError, TooFewLayersError
from pipeplan.plan.learning_cost import CORRECTED_DELAY, is_helped
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import DOUBLE_BUFFERED, FLUSH, STASHING, ZERO_BUBBLE
from pipeplan.planning.candidates import (
    CHOICE_GAP,
    Candidate,
    Machines,
    best_of,
    candidate_of,
    fastest_found,
    improved,
    least_step_s,
    like,
    problem_of,
    sized,
    sizes_for,
    virtual_flushes,
    zero_bubbles,
)
from pipeplan.planning.figure import TOLERANCE, simplest_of
from pipeplan.planning.local_search import PlanSearch
from pipeplan.planning.prove import Relaxation
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import NO_DEADLINE, Deadline

DDP, ZERO_1, FSDP, HSDP, ONE_SERVER, ONE_WORKER = "DDP", "ZeRO-1", "FSDP", "HSDP", "one server", "one worker"
BY_SPEED, UNIFORM, PIPELINE, STALE = "DDP by speed", "uniform pipeline", "pipeline", "old gradients"
NEARLY = 0.1
"""Relative. Pipelines that are slower than the fastest by no more are tried under zb-h1, which may turn the order."""
LISTED_SIZES = 2
"""The most microbatch sizes, those of the fastest candidates, for which plans are listed."""
ANY = float("inf")
"""The staleness that allows gradients of any age."""


@dataclass(frozen=True)
class Question:
    """The problem that a plan is chosen for."""

    machines: Machines
    options: Options
    """The user's constraints. Schedule, correction and microbatches per update are left to the choice."""
    batch: int | None = None
    """Global batch in samples; None for one microbatch on every worker."""
    minibatch: int | None = None
    """Microbatch size in samples; None for the best one."""
    staleness: float = 0
    """The age of the oldest gradients that may be used, in updates; `ANY` for any."""
    alone: Machines | None = None
    """One worker that has the machine to itself, where workers would share its cores."""
    maximum_cuts: int = 50_000
    simulates: bool = True

    @property
    def samples(self) -> int:
        """The global batch in samples."""
        if self.batch is not None:
            return self.batch
        workers = min(self.machines.cluster.workers, self.options.max_workers or self.machines.cluster.workers)
        return workers * (self.minibatch or self.machines.profile.minibatch)


@dataclass(frozen=True)
class Choice:
    """The candidates of a question, and the one that is taken."""

    samples: int
    """The global batch in samples."""
    assumed: bool
    """Whether the user left the global batch open."""
    staleness: float
    taken: Candidate
    rivals: tuple[Candidate, ...]
    """The synchronous candidate that is taken, and the best one of every other kind."""
    stale: Candidate | None
    """The fastest plan with old gradients, if it is faster than the synchronous ones by more than the tolerance."""
    sharded_sample_s: float
    """Seconds per sample of the fastest plan that divides the weights and is allowed; infinite without one."""
    widest: Candidate | None
    """The fastest synchronous plan on the most workers that was found."""
    finished: bool
    """Whether all searches ended before the time limit."""
    interrupted: bool = False
    """Whether Ctrl-C ended them."""
    bounds: Mapping[int, float] = field(default_factory=dict)
    """By microbatch size: no plan of 1f1b-flush takes fewer seconds per sample."""
    bounds_of_both: Mapping[int, float] = field(default_factory=dict)
    """The same for all plans of 1f1b-flush and of zb-h1."""
    searched_all: bool = False
    """Whether the problem of the plan that is taken holds all plans of its schedule with its microbatch size."""

    def bound_s(self, solved_s: float) -> float:
        """Seconds per microbatch of the taken plan's size that no plan of the question undercuts.

        `solved_s` is what the solvers have proven for the problem of the taken plan, which may be a part of the
        question: one stage, another schedule, one microbatch size. A plan with old gradients is compared with others of
        its schedule alone, one of zb-h1 with those of 1f1b-flush too.
        """
        size = self.taken.problem.profile.minibatch
        bounds = dict(self.bounds_of_both if self.taken.problem.options.schedule == ZERO_BUBBLE else self.bounds)
        if self.taken.delay > 0 or not bounds:
            return min(solved_s, self.sharded_sample_s * size)
        if self.searched_all:
            bounds[size] = max(bounds.get(size, 0.0), solved_s / size)
        return min(self.sharded_sample_s * size, *(bound * size for bound in bounds.values()))

    @property
    def bound_sample_s(self) -> float:
        """No synchronous plan takes fewer seconds per sample: the least of the bounds on plans that keep whole weights,
        and of the figures of those that divide them, all of which are tried."""
        return min(self.sharded_sample_s, min(self.bounds.values(), default=0.0))

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
            "bound_sample_s": self.bound_sample_s,
            "finished": self.finished,
        }


def choose(question: Question, deadline: Deadline = NO_DEADLINE) -> Choice:
    """The answer to a question.

    Ctrl-C ends the searches with what was found until then. Raises `InputError` for a batch that cannot be cut into
    microbatches, `InfeasibleError` where no candidate fits, and `NotFoundInTimeError` where none was found in time.
    """
    search = _Chooser(question, deadline)
    try:
        search.run()
    except KeyboardInterrupt:
        search.finished, search.interrupted = False, True
        if not any(one.allowed for one in search.found) and search.stale is None:
            raise KeyboardInterrupt("no plan was found until then") from None
    return search.choice()


@dataclass
class _Chooser:
    """The searches for the candidates of a question."""

    question: Question
    deadline: Deadline
    found: list[Candidate] = field(default_factory=list)
    """Synchronous candidates."""
    stale: Candidate | None = None
    bounds: dict[int, float] = field(default_factory=dict)
    """By microbatch size, a lower bound on the seconds per sample of all plans of 1f1b-flush."""
    relaxed: dict[bool, Relaxation] = field(default_factory=dict)
    """The bounds of relaxations: for plans of 1f1b-flush and zb-h1 (True), and of 1f1b-flush alone (False)."""
    steady: list[Plan] = field(default_factory=list)
    """The best plans without a flush."""
    split: set[tuple[Problem, Plan]] = field(default_factory=set)
    """The plans whose stages were tried under zb-h1."""
    finished: bool = True
    interrupted: bool = False
    refused: TooFewLayersError | None = None

    def run(self) -> None:
        """Search for all candidates, the simplest first, so that those after them have a figure to beat."""
        question = self.question
        known, others = sizes_for(question.machines.profile, question.samples, question.minibatch)
        self._one_stage(known)
        self._alone()
        self._old_gradients()
        finished, self.finished = self.finished, True
        self._relax(known, 0.12)
        self._pipelines(known)
        self._search_all(known)
        self._relax(known, 0.9)
        if not self.finished and not self.deadline.passed:
            # Searches that needed less than their share of the time have left it to those that were cut off.
            self.finished = True
            self._best_of_sizes(PIPELINE, known, extrapolated=False, bounds=True)
        self.finished = self.finished and finished
        if not self._allowed:
            self._one_stage(others, extrapolated=True)
            self._pipelines(others, extrapolated=True)

    def _relax(self, sizes: list[int], share: float) -> None:
        """Bound the pipelines of all sizes: those of 1f1b-flush and zb-h1 together, then those of 1f1b-flush alone."""
        question, fastest, ends = self.question, best_of(self._allowed), self.deadline.share(share)
        if question.options.grid or question.options.stages == 1 or not (sizes and question.simulates):
            return
        best_sample_s = float("inf") if fastest is None else fastest.sample_s
        for splits in (True, False):
            if splits not in self.relaxed:
                self.relaxed[splits] = Relaxation(question.machines, question.options, question.samples, splits)
            one, both = self.relaxed[splits], self.relaxed[True]
            one.main = both.main
            one.learn(
                {size: max(both.bounds.get(size, 0.0), not splits and self.bounds.get(size, 0.0)) for size in sizes}
            )
            one.tighten(sizes, best_sample_s, ends)

    def _relaxed_bounds(self, size: int, *, both: bool) -> float:
        """The lower bound that the relaxations prove for a size, in seconds per sample; 0 where they prove none.

        Plans of one stage are proven by their formulas.
        """
        whole = (one for one in self.found if len(one.plan.stages) == 1 and not one.sharding.divides_weights)
        alone_s = min((one.figure.formula_s / one.problem.profile.minibatch for one in whole), default=float("inf"))
        kinds = [one for splits, one in self.relaxed.items() if splits or not both]
        return min(alone_s, max((one.bounds.get(size, 0.0) for one in kinds), default=0.0))

    def _search_all(self, sizes: list[int]) -> None:
        """Search all cuts of the sizes that were searched between blocks alone, for a bound and maybe a faster plan."""
        for size in sizes:
            fastest = best_of(self._allowed)
            if fastest is None or self.question.options.grid or not self.question.simulates:
                return
            try:
                problem = problem_of(self.question.machines, self.question.options, size, self.question.samples)
            except InputError:
                continue
            least_sample_s, bound = least_step_s(problem) / size, self.bounds.get(size, 0.0)
            open_gap = max(bound, self._relaxed_bounds(size, both=False)) * (1 + TOLERANCE) < fastest.sample_s
            if open_gap and bound <= least_sample_s * (1 + ROUNDING):
                found = self._add(PIPELINE, problem, fastest.sample_s * size, extrapolated=False, gap=0.0)
                self.bounds[size] = max(bound, found / size)

    # -- synchronous candidates --

    def _one_stage(self, sizes: list[int], *, extrapolated: bool = False) -> None:
        """Data parallelism: plain, with a divided optimiser, with divided weights, and on one server."""
        options, cluster = self.question.options, self.question.machines.cluster
        alone: dict[str, Any] = {"stages": 1, "max_stages": None, "grid": False, "pins": ()}
        kinds = [(DDP, alone)]
        if options.sharding == Sharding.NONE and len({device.speed for device in cluster.distinct_devices}) > 1:
            kinds.append((BY_SPEED, alone | {"unequal_shares": True}))
        if options.sharding == Sharding.NONE and self.question.machines.profile.optimizer_elementwise:
            kinds.append((ZERO_1, alone | {"sharding": Sharding.OPTIMIZER}))
        kinds.append((FSDP, alone | {"sharding": Sharding.FULL}))
        server = max(cluster.server_sizes)
        if 1 < server < cluster.workers:
            kinds.append((HSDP, alone | {"sharding": Sharding.HYBRID}))
        if server < min(cluster.workers, options.max_workers or cluster.workers):
            kinds.append((ONE_SERVER, alone | {"max_workers": server}))
        for kind, changes in kinds:
            self._best_of_sizes(kind, sizes, extrapolated, allowed=self._may_have_one_stage, **changes)

    @property
    def _may_have_one_stage(self) -> bool:
        """Whether the user's constraints allow a plan of one stage."""
        options = self.question.options
        return options.stages in (None, 1) and not any(stage > 1 for _, stage in options.pins)

    def _alone(self) -> None:
        """One worker that has the machine to itself."""
        alone = self.question.alone
        if alone is None or not self._may_have_one_stage:
            return
        size = self.question.minibatch or alone.profile.minibatch
        if self.question.samples % size == 0:
            changes = {"stages": 1, "max_stages": None, "max_workers": None, "grid": False}
            problem = problem_of(alone, self.question.options, size, self.question.samples, **changes)
            self._add(ONE_WORKER, problem, float("inf"), extrapolated=False)

    def _pipelines(self, sizes: list[int], *, extrapolated: bool = False) -> None:
        """Any plan of 1f1b-flush, the best uniform one, and the other synchronous schedules."""
        options = self.question.options
        if options.stages != 1 and not options.grid:
            self._best_of_sizes(UNIFORM, sizes, extrapolated, grid=True, allow_copies=False)
            # The search of all cuts may take all the time that is left.
            self._split_best()
        self._best_of_sizes(PIPELINE, sizes, extrapolated, bounds=True)
        if options.grid or not self.question.simulates:
            return
        self._from_steady_state(sizes)
        self._split_best()
        for size in self._fastest_sizes(sizes)[:LISTED_SIZES]:
            self._listed(size, extrapolated)
        best = best_of([one for one in self._allowed if one.kind in (PIPELINE, UNIFORM)])
        if best is not None:
            self.found += virtual_flushes(best, self.deadline.share(0.8))

    def _from_steady_state(self, sizes: list[int]) -> None:
        """The stages of the best plan without a flush, under a flush: where updates are rare it is near the best."""
        question = self.question
        for plan in self.steady:
            for size in self._fastest_sizes(sizes)[:LISTED_SIZES]:
                problem = problem_of(question.machines, question.options, size, question.samples)
                self.found += like(plan, PIPELINE, problem, self.deadline.share(0.2))

    def _split_best(self) -> None:
        """Try zb-h1 with the stages of the fastest pipelines of each kind and size that are nearly the fastest."""
        pipelines = [one for one in self._allowed if one.kind in (PIPELINE, UNIFORM)]
        if not (pipelines and self.question.simulates):
            return
        fastest: dict[tuple[str, int], Candidate] = {}
        for one in sorted(pipelines, key=lambda one: one.sample_s):
            fastest.setdefault((one.kind, one.problem.profile.minibatch), one)
        starts = [*fastest.values(), simplest_of(pipelines)]
        for start in starts:
            near = start.sample_s <= starts[0].sample_s * (1 + NEARLY)
            if near and (start.problem, start.plan) not in self.split:
                self.split.add((start.problem, start.plan))
                self.found += zero_bubbles(start, self.deadline.share(0.2))

    def _fastest_sizes(self, sizes: list[int]) -> list[int]:
        """The sizes of the candidates, fastest first; all sizes in their order where there is no candidate."""
        fastest_first = sorted(self._allowed, key=lambda one: one.sample_s)
        found = dict.fromkeys(one.problem.profile.minibatch for one in fastest_first)
        return [size for size in found if size in sizes] or sizes

    def _listed(self, size: int, extrapolated: bool) -> None:
        """Uniform plans of unequal servers, and plans of every number of stages and workers."""
        question = self.question
        for kind, schedule in ((UNIFORM, FLUSH), (PIPELINE, FLUSH), (ZERO_BUBBLE, ZERO_BUBBLE)):
            try:
                problem = problem_of(question.machines, question.options, size, question.samples, schedule=schedule)
            except InputError:
                return
            fastest = best_of(self._allowed)
            limit_s = float("inf") if fastest is None else fastest.sample_s * size * (1 + TOLERANCE)
            search = PlanSearch(problem, self.deadline.share(0.3))
            try:
                search.uniform(limit_s) if kind == UNIFORM else search.listed(limit_s)
            finally:
                self.found += fastest_found(kind, search, extrapolated)

    def _best_of_sizes(
        self,
        kind: str,
        sizes: list[int],
        extrapolated: bool,
        *,
        bounds: bool = False,
        allowed: bool = True,
        **changes: Any,
    ) -> None:
        """Add the best candidate of a kind among microbatch sizes. With `bounds` its problems hold all plans."""
        question, best_sample_s = self.question, float("inf")
        for size in sizes:
            try:
                problem = problem_of(question.machines, question.options, size, question.samples, **changes)
            except TooFewLayersError as error:
                self.refused = error
                return
            except InputError:
                if changes:
                    return  # The options of this kind contradict the user's.
                raise
            useful_sample_s = best_sample_s
            if bounds and self._allowed:
                # zb-h1 may make a plan the fastest that is slower under 1f1b-flush.
                alike = [one.sample_s for one in self._allowed if one.kind != ZERO_BUBBLE]
                useful_sample_s = min(useful_sample_s, *alike)
                if self._relaxed_bounds(size, both=True) >= useful_sample_s:
                    self.bounds[size] = max(self.bounds.get(size, 0.0), useful_sample_s)
                    continue
            bound_s = self._add(kind, problem, useful_sample_s * size, extrapolated=extrapolated, allowed=allowed)
            if bounds:
                self.bounds[size] = max(self.bounds.get(size, 0.0), bound_s / size)
            best_sample_s = min((one.sample_s for one in self.found if one.kind == kind), default=best_sample_s)

    @property
    def _allowed(self) -> list[Candidate]:
        """The synchronous candidates that satisfy the user's constraints."""
        return [one for one in self.found if one.allowed]

    def _add(
        self,
        kind: str,
        problem: Problem,
        useful_s: float,
        *,
        extrapolated: bool,
        allowed: bool = True,
        gap: float = CHOICE_GAP,
    ) -> float:
        """Search for a problem's best plan, and keep it. Returns a lower bound in seconds per microbatch."""
        ends, simulates = self.deadline.share(0.4), self.question.simulates
        one, bound_s = candidate_of(
            kind, problem, self.question.maximum_cuts, ends, useful_s, simulates=simulates, gap=gap
        )
        self.finished = self.finished and not ends.passed
        if one is not None:
            # Ctrl-C while it is improved leaves it as it is.
            self.found.append(replace(one, allowed=allowed, extrapolated=extrapolated))
            self.found[-1] = improved(self.found[-1], ends)
            bound_s = min(bound_s, self.found[-1].figure.step_s)
        return bound_s

    # -- old gradients --

    def _old_gradients(self) -> None:
        """The fastest plan with old gradients: up to the delay that is allowed, or of any age to be told about."""
        question = self.question
        tolerated = question.staleness if question.staleness > 0 else ANY
        fastest = best_of(self._allowed)
        useful_sample_s = float("inf") if fastest is None else fastest.sample_s
        machines = question.machines
        corrects = is_helped(machines.profile.optimizer_name, machines.profile.optimizer_state_ratio)
        for problem in self._stale_problems(tolerated):
            one = self._stale_plan(problem, useful_sample_s)
            if one is not None and len(one.plan.stages) > 1 and one.plan.copies == 1:
                self.steady.append(one.plan)
            if one is not None and corrects and one.delay <= CORRECTED_DELAY:
                # Where memory is too short for a correction, the plan goes without.
                corrected = replace(problem, options=replace(problem.options, correction="ef"))
                one = self._stale_plan(corrected, float("inf")) or one
            if one is not None and 0 < one.delay <= tolerated:
                self.stale = best_of([one, *([] if self.stale is None else [self.stale])])

    def _stale_plan(self, problem: Problem, useful_sample_s: float) -> Candidate | None:
        useful_s, cuts = useful_sample_s * problem.profile.minibatch, self.question.maximum_cuts
        simulates, ends = self.question.simulates, self.deadline.share(0.4)
        one = candidate_of(STALE, problem, cuts, ends, useful_s, simulates=simulates)[0]
        return None if one is None else improved(one, ends)

    def _stale_problems(self, tolerated: float) -> Iterator[Problem]:
        """The problems whose plans may have gradients up to so many updates old.

        1f1b-stashing updates a stage after as many microbatches as it has replicas. With a given batch no stage may
        update less often than that, which 2bw keeps.
        """
        question = self.question
        machines, size = question.machines, question.minibatch or question.machines.profile.minibatch
        profile = sized(machines.profile, size)
        options = replace(question.options, accumulate=None, correction="none")
        kinds: list[dict[str, Any]] = []
        if question.batch is None:
            kinds.append({"schedule": STASHING})
            if tolerated != ANY and options.stages is None:
                # Gradients of an unreplicated pipeline are as old as stages follow.
                kinds.append({"schedule": STASHING, "max_stages": min(int(tolerated) + 1, options.max_stages or 99)})
        if question.samples % size == 0:
            kinds.append({"schedule": DOUBLE_BUFFERED, "accumulate": question.samples // size})
        for changes in kinds:
            try:
                yield Problem(profile, machines.cluster, replace(options, **changes))
            except (TooFewLayersError, InputError):
                continue

    # -- the answer --

    def choice(self) -> Choice:
        """The choice among what was found. Raises `InfeasibleError` if that is nothing."""
        question = self.question
        allowed = self.stale if self.stale is not None and self.stale.delay <= question.staleness else None
        if not self._allowed and allowed is None:
            if self.refused is not None:
                raise self.refused
            if not self.finished:
                raise NotFoundInTimeError(NO_PLAN_IN_TIME)
            raise InfeasibleError("no plan fits in memory")
        synchronous = simplest_of(self._allowed) if self._allowed else None
        fastest = best_of(self._allowed)
        taken = synchronous
        if allowed is not None and (fastest is None or allowed.sample_s * (1 + TOLERANCE) < fastest.sample_s):
            taken = allowed
        assert taken is not None
        kinds = dict.fromkeys(one.kind for one in self.found)
        # The plan that is taken represents its kind: a faster one within the tolerance is less simple.
        rivals = [
            taken if taken.kind == kind else best_of([one for one in self.found if one.kind == kind]) for kind in kinds
        ]
        listed = (one.sample_s for one in self._allowed if one.problem.options.is_listed)
        most = max((one.plan.busy for one in self._allowed), default=0)
        stale = self.stale
        if stale is not None and fastest is not None and stale.sample_s * (1 + TOLERANCE) >= fastest.sample_s:
            stale = None
        size, options = taken.problem.profile.minibatch, taken.problem.options
        everything = problem_of(question.machines, question.options, size, question.samples).options
        alike = replace(options, schedule=FLUSH) if options.schedule == ZERO_BUBBLE else options
        best_s = fastest.sample_s if fastest is not None else float("inf")
        bounds = {
            size: min(best_s, max(bound, self._relaxed_bounds(size, both=False))) for size, bound in self.bounds.items()
        }
        both = {size: min(best_s, self._relaxed_bounds(size, both=True)) for size in self.bounds if self.relaxed}
        return Choice(
            samples=question.samples,
            assumed=question.batch is None,
            staleness=question.staleness,
            taken=taken,
            rivals=tuple(one for one in rivals if one is not None),
            stale=stale,
            sharded_sample_s=min(listed, default=float("inf")),
            widest=best_of([one for one in self._allowed if one.plan.busy == most]),
            finished=self.finished,
            interrupted=self.interrupted,
            bounds=bounds,
            bounds_of_both=both,
            searched_all=alike == everything,
        )
