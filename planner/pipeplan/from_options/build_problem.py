"""Builds the problem that the user describes, and makes the choices among problems that are left to pipeplan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.machine_costs import as_charged, with_one_worker
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError, InputError, NotFoundInTimeError
from pipeplan.exports.solve_for import TargetedProblem
from pipeplan.exports.target import export_target
from pipeplan.from_options.option_fields import options_for
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSH
from pipeplan.planning.choose_minibatch import MinibatchChoice, choose_minibatch, sizes_to_try
from pipeplan.planning.choose_order import OrderChoice, choose_order
from pipeplan.planning.choose_schedule import ScheduleChoice, check_staleness, choose_schedule, minibatch_sizes
from pipeplan.planning.choose_synchrony import BEST, GAIN, RATE, SynchronyChoice, check_objective, choose_synchrony
from pipeplan.planning.fast import ScoredPlan, best_in_time
from pipeplan.planning.one_worker import OneWorkerChoice
from pipeplan.planning.settings import MAXIMUM_CUTS, SHARES
from pipeplan.planning.simplest import LEAST_GAIN
from pipeplan.planning.stated.choose import stated_plan_s
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan.util.text import did_you_mean

AUTO: Literal["auto"] = "auto"
SERVER_ORDERS = ("any", "listed")
"""Orders in which a pipeline may run through servers that differ: any, or only that of the cluster file."""


@dataclass(frozen=True)
class BuiltProblem:
    """A problem, and the results of choosing a schedule or a minibatch size for it."""

    problem: Problem
    schedules: tuple[ScheduleChoice, ...] = ()
    """All schedules tried, best first; empty unless the schedule was `auto`."""
    synchrony: SynchronyChoice | None = None
    """The choice between synchronous and asynchronous plans; None unless the schedule was `best`."""
    sizes: tuple[MinibatchChoice, ...] = ()
    """All minibatch sizes tried, best first; empty unless the minibatch was `auto`."""
    targeted: TargetedProblem | None = None
    """The trainer that the plan is for, if one was named."""
    orders: tuple[OrderChoice, ...] = ()
    """All orders of the servers that were tried, best first; empty where there was nothing to choose."""
    one_worker: OneWorkerChoice | None = None
    """Why the problem is that of one worker, where the cluster has more."""
    compared: ScoredPlan | None = None
    """The best plan, where it was compared with that of one worker, or is that one."""

    @property
    def known(self) -> tuple[Plan, ...]:
        """The plan of this problem by which it was chosen, if there is one."""
        if self.compared is not None:
            return (self.compared.plan,)
        taken = None if self.synchrony is None else self.synchrony.taken
        return (taken.plan,) if taken is not None and taken.problem.cluster == self.problem.cluster else ()


@dataclass(frozen=True)
class _Request:
    """The arguments of `build_problem`, but for the order of the servers."""

    profile: Profile
    cluster: Cluster
    minibatch: int | Literal["auto"] | None
    batch: int | None
    staleness: str | None
    target: str | None
    asynchronous_gain: float
    maximum_cuts: int
    deadline: Deadline
    options: dict[str, Any]
    objective: str = RATE
    server_order: str = "any"
    simplest: float = 0.0
    simulate: bool = True
    before_search: Callable[[], None] = lambda: None

    def charged(self) -> _Request:
        """The request with the times that layers take beside all other workers that may be busy."""
        busy = min(self.cluster.workers, self.options.get("max_workers") or self.cluster.workers)
        profile, cluster = as_charged(self.profile, self.cluster, busy)
        return replace(self, profile=profile, cluster=cluster)

    @property
    def scaled(self) -> Profile:
        """The profile at the minibatch size, if one is given; the profile itself for `auto`."""
        if not isinstance(self.minibatch, int) or self.minibatch == self.profile.minibatch:
            return self.profile
        return self.profile.rescaled(self.minibatch)

    def unscheduled(self, choice: str) -> Options:
        """The options that all schedules share, for a choice among them. Raises `InputError`."""
        if self.options.get("accumulate") is not None:
            raise InputError(f"--accumulate follows from --batch with --schedule {choice}: leave it out")
        if self.options.get("inference"):
            raise InputError("--schedule is for training: leave it out with --inference")
        shared = {name: value for name, value in self.options.items() if name != "schedule"}
        return options_for(self.cluster.device.kind, **shared)


def build_problem(
    profile: Profile,
    cluster: Cluster,
    *,
    minibatch: int | Literal["auto"] | None = None,
    batch: int | None = None,
    staleness: str | None = None,
    target: str | None = None,
    server_order: str = "any",
    asynchronous_gain: float = GAIN,
    maximum_cuts: int = MAXIMUM_CUTS,
    deadline: Deadline = NO_DEADLINE,
    objective: str = RATE,
    simplest: float = 0.0,
    simulate: bool = True,
    before_search: Callable[[], None] = lambda: None,
    **options: Any,
) -> BuiltProblem:
    """The problem that the user describes; `options` are fields of `Options`.

    `minibatch` is another size than the profile's, or `auto` for the best of those measured. `schedule="auto"` takes
    the best schedule for a global `batch`, in samples per update, among those whose weights are at most as old as
    `staleness` (`none`, `bounded`, `any`) allows; `schedule="best"` takes the synchronous plan unless an asynchronous
    one has more samples per second by the share `asynchronous_gain`, and gradients that are not too old. That is the
    default of training without a number of minibatches per update, a target, or `minibatch="auto"`. A `target`, the
    name of an export, restricts plans to those that this trainer can express, with `batch` samples per update if that
    is given. With the `objective` `time-to-goal`, `schedule="best"` compares rates divided by the measured cost in
    samples to the goal. The servers of a heterogeneous cluster are put in the best order, unless the `server_order` is
    `listed` or the plan is for a `target`, which numbers them itself. Where workers share the processors of a machine
    and the profile has times under load, the problem is that of one worker if its plan is as fast, or slower by less
    than what makes a plan of several stages worth its trouble (`simplest`, as in `Settings`). A choice that takes
    searches has a share of the time until the deadline. Plans are compared by their stated paces, or without `simulate`
    by the formulas; orders of the servers by the formulas. `before_search` is called, once or several times, when the
    options have been checked and no search has begun.

    Raises `InputError` for options that contradict each other, and `InfeasibleError` where no candidate has a plan.
    """
    if server_order not in SERVER_ORDERS:
        raise InputError(f"there is no server order {server_order!r}; {did_you_mean(server_order, SERVER_ORDERS)}")
    check_objective(objective)
    if _chooses_schedule(minibatch, target, options):
        options = options | {"schedule": BEST}
    request = _Request(
        profile,
        cluster,
        minibatch,
        batch,
        staleness,
        target,
        asynchronous_gain,
        maximum_cuts,
        deadline,
        options,
        objective,
        server_order,
        simplest,
        simulate,
        before_search,
    )
    charged = request.charged()
    built = _in_best_order(charged)
    return built if charged.profile is request.profile else _or_one_worker(built, request)


def _in_best_order(request: _Request) -> BuiltProblem:
    """The problem on the cluster, with its servers in the best order unless that is given."""
    built = _in_listed_order(request)
    if request.server_order == "listed" or request.target is not None:
        return built
    problem, orders = choose_order(built.problem, request.maximum_cuts, request.deadline.share(SHARES["choice"]))
    return replace(built, problem=problem, orders=tuple(orders))


def _or_one_worker(built: BuiltProblem, request: _Request) -> BuiltProblem:
    """The problem of one worker with the times alone, where its plan is as fast as the best one of all workers."""
    if request.target is not None or request.objective != RATE or request.options.get("stages") not in (None, 1):
        return built
    try:
        built = _compared(built, request)
        alone = _compared(
            _in_listed_order(replace(request, cluster=with_one_worker(request.cluster)).charged()), request
        )
    except (InputError, InfeasibleError, NotFoundInTimeError):
        return built  # The options are for several workers.
    alone_s, best_s = _sample_s(alone, request), _sample_s(built, request)
    if alone_s is None or best_s is None or alone_s > best_s * (1 + _worth_its_trouble(built, request)):
        return built
    choice = OneWorkerChoice(request.cluster.workers, alone_s, best_s)
    reason = f"Chosen: synchronous, because {choice.text}."
    synchrony = None if alone.synchrony is None else replace(alone.synchrony, reason=reason)
    return replace(alone, synchrony=synchrony, one_worker=choice)


def _compared(built: BuiltProblem, request: _Request) -> BuiltProblem:
    """The problem with its best plan by the DP, which the solve need not search for again, if one is found in time."""
    if built.synchrony is not None:
        return built
    found, _ = best_in_time(built.problem, request.maximum_cuts, request.deadline.share(SHARES["choice"]))
    return replace(built, compared=found)


def _sample_s(built: BuiltProblem, request: _Request) -> float | None:
    """Seconds per sample of the best plan of a problem, as they are stated, or by the formulas without `simulate`.

    None where there is no plan, or none was found in time.
    """
    if built.synchrony is not None:
        return built.synchrony.taken.sample_s
    if built.compared is None:
        return None
    problem, plan, pace_s = built.problem, built.compared.plan, built.compared.pace_s
    if request.simulate:
        ends = request.deadline.share(SHARES["choice"])
        pace_s = stated_plan_s(problem, plan, evaluate(plan, problem), ends)
    return pace_s / problem.profile.minibatch


def _worth_its_trouble(built: BuiltProblem, request: _Request) -> float:
    """The share by which the best plan of a problem has to be faster than one worker."""
    choice = built.synchrony
    if choice is not None and choice.taken is choice.asynchronous:
        return choice.gain
    return max(request.simplest, LEAST_GAIN) if request.simplest > 0 else 0.0


def _chooses_schedule(minibatch: object, target: str | None, options: Mapping[str, Any]) -> bool:
    """Whether the user leaves it to pipeplan if the plan is synchronous."""
    given = options.get("schedule") or options.get("accumulate") is not None or options.get("inference")
    return not given and target is None and minibatch != AUTO


def _in_listed_order(request: _Request) -> BuiltProblem:
    """The problem on the cluster as it is listed."""
    minibatch, batch, target, options = request.minibatch, request.batch, request.target, request.options
    schedule = options.get("schedule")
    if request.objective != RATE and schedule != BEST:
        raise InputError(
            "--objective time-to-goal compares schedules: leave out what names one, or give --schedule best"
        )
    if schedule in (AUTO, BEST):
        if target is not None:
            raise InputError(f"--for has a schedule of its own: leave out --schedule {schedule}")
        return _with_best_schedule(request) if schedule == AUTO else _synchronous_or_not(request)
    if request.staleness is not None:
        check_staleness(request.staleness.lower())
        if request.staleness.lower() != "any":
            raise InputError(
                "--staleness goes with --schedule best or auto, which choose the schedule by it: leave it out"
            )
    if batch is not None and target is None:
        raise InputError("--batch goes with --schedule best or auto, or --for; otherwise give --accumulate")
    scaled = request.scaled
    if batch is not None:
        sizes = [size.minibatch for size in scaled.all_sizes] if minibatch == AUTO else [scaled.minibatch]
        options = options | {"accumulate": _minibatches_per_update(options.get("accumulate"), batch, sizes)}
    unrestricted = Problem(scaled, request.cluster, options_for(request.cluster.device.kind, **options))
    targeted = None if target is None else TargetedProblem(export_target(target), unrestricted)
    problem = unrestricted if targeted is None else targeted.problem
    if minibatch == AUTO:
        sizes_to_try(problem.profile)  # raises for a profile of one size
    request.before_search()
    if minibatch != AUTO:
        return BuiltProblem(problem, targeted=targeted)
    ends = request.deadline.share(SHARES["choice"])
    problem, tried = choose_minibatch(problem, request.maximum_cuts, batch, ends, simulate=request.simulate)
    if targeted is not None:
        chosen = replace(unrestricted.options, accumulate=problem.options.accumulate)
        targeted = replace(targeted, unrestricted=replace(unrestricted, profile=problem.profile, options=chosen))
    return BuiltProblem(problem, sizes=tuple(tried), targeted=targeted)


def _minibatches_per_update(accumulate: int | None, batch: int, sizes: list[int]) -> int:
    """Minibatches per update for a batch of so many samples, of the first size that divides it."""
    if accumulate is not None:
        raise InputError("--accumulate follows from --batch: leave one of them out")
    fitting = [size for size in sizes if batch % size == 0]
    if batch < 1 or not fitting:
        raise InputError(
            f"a batch of {batch} samples cannot be cut into minibatches of {' or '.join(map(str, sizes))}: give "
            "--batch a multiple, or --minibatch another size"
        )
    return batch // fitting[0]


def _with_best_schedule(request: _Request) -> BuiltProblem:
    """The problem with the best schedule."""
    if request.minibatch == AUTO:
        raise InputError("--schedule auto chooses the minibatch size itself, from --batch: leave out --minibatch auto")
    if request.batch is None:
        raise InputError("--schedule auto needs the global batch: give --batch, in samples per update")
    options, deadline = request.unscheduled(AUTO), request.deadline.share(SHARES["choice"])
    staleness = (request.staleness or "any").lower()
    check_staleness(staleness)
    _check_choice(request, options)
    problem, choices = choose_schedule(
        request.scaled,
        request.cluster,
        options,
        request.batch,
        staleness,
        request.maximum_cuts,
        deadline,
        simulate=request.simulate,
    )
    return BuiltProblem(problem, schedules=tuple(choices))


def _check_choice(request: _Request, options: Options) -> None:
    """Raise what every schedule would be refused for, then call `before_search`."""
    samples = request.scaled.minibatch if request.batch is None else request.batch
    count = samples // minibatch_sizes(request.scaled.minibatch, samples)[0]
    # Under a schedule with a flush the most layers may be in stages of their own.
    Problem(request.scaled, request.cluster, replace(options, schedule=FLUSH, accumulate=count, correction="none"))
    request.before_search()


def _synchronous_or_not(request: _Request) -> BuiltProblem:
    """The problem of the better one of the fastest synchronous and the fastest asynchronous plan."""
    if request.minibatch == AUTO:
        raise InputError("--schedule best compares plans of one minibatch size: leave out --minibatch auto")
    options, gain = request.unscheduled(BEST), request.asynchronous_gain
    if not 0 <= gain < float("inf"):
        raise InputError(f"the asynchronous gain must be a share of at least 0, not {gain:g}")
    staleness = None if request.staleness is None else request.staleness.lower()
    if staleness is not None:
        check_staleness(staleness)
    _check_choice(request, options)
    try:
        choice = choose_synchrony(
            request.scaled,
            request.cluster,
            options,
            request.batch,
            staleness,
            gain,
            request.maximum_cuts,
            request.deadline.share(SHARES["choice"]),
            may_correct=request.options.get("correction") is None,
            objective=request.objective,
            simulate=request.simulate,
        )
    except (InfeasibleError, NotFoundInTimeError):
        # The solve of any of the problems finds out why.
        return BuiltProblem(Problem(request.scaled, request.cluster, options))
    return BuiltProblem(choice.taken.problem, synchrony=choice)
