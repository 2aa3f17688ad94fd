"""Builds the problem that the user describes, and makes the choices that the user leaves to pipeplan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.machine_costs import as_charged, with_one_worker
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.exports.target import ExportFile, ExportTarget, export_files, export_target
from pipeplan.from_options.choose_order import OrderChoice, choose_order, distinct_orders, in_order
from pipeplan.from_options.option_fields import options_for
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, FLUSHING, SCHEDULES, STASHING, VIRTUAL
from pipeplan.planning.candidates import candidate_of, improved, virtual_candidate
from pipeplan.planning.choose import Choice, choose
from pipeplan.planning.fast import best_plan
from pipeplan.planning.figure import TOLERANCE, figured
from pipeplan.planning.local_search import PlanSearch, improve
from pipeplan.planning.outcome import TOLERANCE as PROVEN_EQUAL
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.question import ANY, Machines, Question, sized, sizes_for
from pipeplan.planning.settings import MAXIMUM_CUTS, SHARES
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import LARGEST_MINIBATCH, Profile
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan.util.text import did_you_mean

MOST_EXTRAPOLATED = 64
"""Times are extrapolated to microbatches of at most this multiple of the largest measured microbatch."""
FEW_ORDERS = 6
"""A plan is chosen separately for each order of devices up to this number of orders: all orders of three devices."""
SIMULATING_S = 5.0
"""Time limit for simulating a plan without the restriction, in seconds."""


@dataclass(frozen=True)
class Request:
    """A question of the user, from the command line or the Python API."""

    profile: Profile
    cluster: Cluster
    batch: int | None = None
    """Global batch in samples; None for one microbatch on every worker."""
    microbatch: int | None = None
    """Microbatch size in samples; None for the best of the profile's sizes."""
    staleness: float | None = None
    """Largest allowed age of gradients, in updates; None if the user gives none."""
    target: str | None = None
    """Name of an export; plans are restricted to those that this trainer can express."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `Options` that the user sets."""
    maximum_cuts: int = MAXIMUM_CUTS
    deadline: Deadline = NO_DEADLINE
    simulate: bool = True
    before_search: Callable[[], None] | None = None
    """A function that is called after the options have been checked and before any search."""

    def __post_init__(self) -> None:
        """Raise an `InputError` for a number that is out of range."""
        if self.batch is not None and self.batch < 1:
            raise InputError(f"--batch must be at least 1 sample, not {self.batch}")
        if self.microbatch is not None and not 1 <= self.microbatch <= LARGEST_MINIBATCH:
            raise InputError(
                f"--microbatch must be at least 1 sample and at most {LARGEST_MINIBATCH}, not {self.microbatch}"
            )
        largest = max(size.minibatch for size in self.profile.all_sizes)
        if self.microbatch is not None and self.microbatch > MOST_EXTRAPOLATED * largest:
            raise InputError(
                f"--microbatch {self.microbatch} is more than {MOST_EXTRAPOLATED} times the largest measured size, "
                f"{largest}: measure one nearer to it"
            )
        if self.staleness is not None and not (isinstance(self.staleness, int | float) and self.staleness >= 0):
            raise InputError(f"staleness: expected a number of updates, or math.inf, found {self.staleness!r}")

    @property
    def chooses(self) -> bool:
        """Whether the user leaves the schedule to pipeplan."""
        named = self.options.get("schedule") or self.options.get("accumulate") or self.options.get("inference")
        return not named and self.target is None

    @property
    def samples(self) -> int:
        """The global batch in samples."""
        if self.batch is not None:
            return self.batch
        workers = min(self.cluster.workers, self.options.get("max_workers") or self.cluster.workers)
        return workers * (self.microbatch or self.profile.minibatch)

    def charged(self) -> Request:
        """The request with the layers' times under load, when all workers that the plan may use compute."""
        busy = min(self.cluster.workers, self.options.get("max_workers") or self.cluster.workers)
        profile, cluster = as_charged(self.profile, self.cluster, busy)
        return replace(self, profile=profile, cluster=cluster)

    def checked_options(self, **changes: Any) -> Options:
        """The options with these changes. Raises `InputError`."""
        return options_for(self.cluster.device.kind, **self.options | changes)


@dataclass(frozen=True)
class TargetedProblem:
    """A target, and the problem without the restrictions of the target."""

    target: ExportTarget
    unrestricted: Problem

    @property
    def problem(self) -> Problem:
        """The problem restricted to plans that the target can express. Raises `InputError` if there are none."""
        problem = self.unrestricted
        return replace(problem, options=self.target.restrict(problem.profile, problem.options))

    def files(self, outcome: Outcome) -> Mapping[str, ExportFile]:
        """The files that the target reads. Raises `InputError` if the target cannot express the plan."""
        return export_files(self.target, outcome.problem, outcome.plan)

    def cost(self, outcome: Outcome, maximum_cuts: int) -> str:
        """The cost of the restriction as a sentence: the best unrestricted plans, and their speedup.

        One plan has the schedule of the target, the other has pipeplan's default schedule. Only the dynamic program
        searches for them.
        """
        # The user's limit on workers also applies to these plans, because it is not a cost of the target.
        restricted = outcome.problem.options
        unrestricted = replace(self.unrestricted.options, max_workers=restricted.max_workers)
        target_schedule = replace(unrestricted, schedule=restricted.schedule, accumulate=restricted.accumulate)
        default = unrestricted
        if unrestricted.schedule not in FLUSHING:  # weight stashing is pipeplan's default
            default = replace(unrestricted, schedule=STASHING, accumulate=None)
        alternatives = []
        for options in dict.fromkeys((target_schedule, default)):
            problem = replace(outcome.problem, options=options)
            best = best_plan(problem, enumerate_cuts(problem, maximum_cuts))
            if best is None:
                continue
            ends = Deadline.after(SIMULATING_S)
            start = figured(best.plan, evaluate(best.plan, problem), problem, ends)
            step_s = improve(start, problem, ends).step_s
            gain = speedup_text(outcome.predicted_s / step_s)
            alternatives.append(f"{best.plan.config} by {options.schedule}, {gain}")
        return (
            f"Restricted to what {self.target.title} can express. Without the restriction: {'; '.join(alternatives)}."
        )


def speedup_text(gain: float) -> str:
    """A speedup in words: `no faster`, `less than 1% faster` or `1.23x faster`."""
    if gain <= 1 + PROVEN_EQUAL:
        return "no faster"
    return "less than 1% faster" if gain < 1.005 else f"{gain:.2f}x faster"


@dataclass(frozen=True)
class BuiltProblem:
    """A problem, and the choices that led to it."""

    problem: Problem
    choice: Choice | None = None
    """The candidates of the choice; None if the user named a schedule."""
    targeted: TargetedProblem | None = None
    """The trainer that the plan is for, if the user named one; else None."""
    orders: tuple[OrderChoice, ...] = ()
    """All orders of the servers that were tried, best first; empty if there is only one order."""

    @property
    def known(self) -> tuple[Plan, ...]:
        """The plan for which this problem was chosen, if there is one."""
        taken = None if self.choice is None else self.choice.taken
        return (taken.plan,) if taken is not None and taken.problem.cluster == self.problem.cluster else ()


def build_problem(request: Request) -> BuiltProblem:
    """The problem of a request.

    If no schedule is named, `planning.choose` chooses the training plan. A `target` restricts plans to those that this
    trainer can express. The servers of a heterogeneous cluster are put into the best order, unless the plan is for a
    target, which numbers servers itself. If the devices of a server differ and have few orders, a plan is chosen for
    each order, because the order may decide whether a pipeline or data parallelism is faster.

    Raises `InputError` for options that contradict each other, and `InfeasibleError` if no candidate has a plan.
    """
    charged = request.charged()
    if request.chooses and charged.cluster.machines and charged.cluster.server_level > 1:
        few = [*itertools.islice(distinct_orders(charged.cluster), FEW_ORDERS + 1)]
        if 1 < len(few) <= FEW_ORDERS:
            return _chosen_in_order(request, few)
    built = _chosen(charged, request) if request.chooses else _named(charged)
    numbers_itself = request.target is not None and not export_target(request.target).orders_devices
    if numbers_itself or built.problem.options.schedule in VIRTUAL:
        return built  # The solver that tries orders does not support these schedules.
    ends = request.deadline.share(SHARES["choice"])
    problem, orders = choose_order(built.problem, request.maximum_cuts, ends, simulates=request.simulate)
    return replace(built, problem=problem, orders=tuple(orders))


def _chosen_in_order(request: Request, orders: Sequence[tuple[int, ...]]) -> BuiltProblem:
    """The problem of the plan that is chosen in the best of these orders.

    The listed order is kept unless another order is faster by more than the tolerance."""
    found, tried = list[BuiltProblem](), list[OrderChoice]()
    for number, order in enumerate(orders):
        ends = request.deadline.share(SHARES["choice"] / (len(orders) - number))
        one = replace(request, cluster=in_order(request.cluster, order), deadline=ends)
        built = _chosen(one.charged(), one)
        taken = None if built.choice is None else built.choice.taken
        step_s, config = (None, "") if taken is None else (taken.sample_s, taken.plan.config)
        finished = built.choice is None or built.choice.finished
        found.append(built)
        tried.append(OrderChoice(built.problem, order, step_s, config, finished))
    times = [math.inf if one.step_time_s is None else one.step_time_s for one in tried]
    best = 0 if times[0] <= min(times) * (1 + TOLERANCE) else times.index(min(times))
    ranked = sorted(range(len(orders)), key=lambda number: (number != best, times[number]))
    return replace(found[best], orders=tuple(tried[number] for number in ranked))


def _chosen(charged: Request, request: Request) -> BuiltProblem:
    """The problem of the plan that is chosen for a request.

    `charged` is the request with times under the load of other busy workers.
    """
    options = charged.checked_options()
    alone = None
    if charged.profile is not request.profile:
        one = replace(request, cluster=with_one_worker(request.cluster)).charged()
        alone = Machines(one.profile, one.cluster)
    question = Question(
        Machines(charged.profile, charged.cluster),
        options,
        request.batch,
        request.microbatch,
        request.staleness or 0,
        alone,
        request.maximum_cuts,
        request.simulate,
    )
    known, others = question.sizes
    # If every candidate would be refused, this raises the reason. A flush schedule allows the most stages.
    question.problem([*known, *others][0], virtual_stages=options.virtual_stages)
    if request.before_search is not None:
        request.before_search()
    try:
        choice = choose(question, request.deadline.share(SHARES["choice"]))
    except InfeasibleError:
        # The solvers report what is missing, for the smallest microbatch.
        return BuiltProblem(question.problem([*known, *others][-1]))
    return BuiltProblem(choice.taken.problem, choice)


def _named(request: Request) -> BuiltProblem:
    """The problem of a request that names a schedule, inference, or a trainer with its own schedule."""
    options, schedule = request.options, request.options.get("schedule")
    if request.staleness is not None and not (request.staleness == ANY and schedule):
        raise InputError("--staleness chooses among schedules: leave it out with --schedule, --inference and --for")
    if schedule and schedule not in SCHEDULES:
        raise InputError(f"there is no schedule {schedule!r}; {did_you_mean(schedule, SCHEDULES)}")
    if options.get("inference") and request.batch is not None:
        raise InputError("--batch is for training: leave it out with --inference")
    size = request.microbatch or request.profile.minibatch
    accumulates = schedule in ACCUMULATING or request.target is not None
    if schedule and not accumulates and request.batch is not None:
        raise InputError(
            f"with {schedule} a stage updates after as many microbatches as it has replicas: leave out --batch"
        )
    if accumulates and options.get("accumulate") is None and (request.batch is not None or schedule in ACCUMULATING):
        known, others = sizes_for(request.profile, request.samples, request.microbatch)
        size = size if size in (*known, *others) else [*known, *others][0]
        if len(known) > 1:
            size = _best_size(request, known, size)
        options = options | {"accumulate": request.samples // size}
    profile = request.profile if size == request.profile.minibatch else request.profile.rescaled(size)
    unrestricted = Problem(profile, request.cluster, options_for(request.cluster.device.kind, **options))
    targeted = _targeted(request, unrestricted)
    problem = unrestricted if targeted is None else targeted.problem
    if request.before_search is not None:
        request.before_search()
    return BuiltProblem(problem, targeted=targeted)


def _targeted(request: Request, problem: Problem) -> TargetedProblem | None:
    """The problem of the trainer that the request names; None if it names none."""
    return None if request.target is None else TargetedProblem(export_target(request.target), problem)


def _best_size(request: Request, sizes: list[int], usual: int) -> int:
    """The microbatch size with the most samples per second under the schedule of the request or target; `usual` if none
    fits.

    All sizes share the time for a choice. Among equally fast sizes, the usual size is taken.
    """
    ends = request.deadline.share(SHARES["choice"])
    best, best_sample_s = usual, math.inf
    for size in sorted(sizes, key=lambda one: one != usual):
        options, share = request.checked_options(accumulate=request.samples // size), ends.share(0.5)
        problem = Problem(sized(request.profile, size), request.cluster, options)
        targeted = _targeted(request, problem)
        try:
            problem = problem if targeted is None else targeted.problem
        except InputError:
            continue  # The target has no plan with this size.
        schedule = problem.options.schedule
        if schedule in VIRTUAL:
            one = virtual_candidate(problem, share)
        else:
            useful_s = best_sample_s * size
            one = candidate_of(schedule, problem, request.maximum_cuts, share, useful_s, simulates=request.simulate)[0]
            one = None if one is None else improved(one, PlanSearch(problem, share))
        if one is not None and one.sample_s < best_sample_s * (1 - 1e-9):
            best, best_sample_s = size, one.sample_s
    return best
