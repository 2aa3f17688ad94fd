"""Candidates of a choice: plans that train the same global batch, each the best of its kind by simulated step time.

The simplest plan within 3% of the fastest is taken. Data parallelism is simplest: plain, then with a divided optimiser,
then with divided weights. A uniform pipeline has the same number of replicas in every stage, or in all stages on one
kind of device. Such a pipeline is simpler than a pipeline with unequal replica counts. Plans of the same kind are
compared by their number of busy workers, then of stages, then of servers that each stage touches: fewer is simpler. If
all these are equal, a plan whose idle workers come last is simpler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeplan.cluster_data.cluster import Cluster, Device
from pipeplan.cluster_data.variants import with_halved_gradients
from pipeplan.cost import contention
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import grid_shape_of, plain_data_parallel, worker_memory
from pipeplan.errors import InfeasibleError, InputError, NotFoundInTimeError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import DOUBLE_BUFFERED, FLUSH, STASHING
from pipeplan.plan.updates import Updates
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.figure import TOLERANCE, Figure, FiguredPlan, figured
from pipeplan.planning.local_search import PlanSearch
from pipeplan.planning.question import ANY, Question
from pipeplan.planning.virtual_stages.virtual_search import search_virtual
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline
from pipeplan.util.units import show_throughput

EXTRAPOLATED = " (extrapolated)"
"""Mark of a microbatch size that a profile neither contains nor interpolates."""
ROUNDED = "DDP, bfloat16 gradients"
CHOICE_GAP = 0.01
"""Relative gap to the best plan by the formulas. With many cuts, the local search starts from plans within this
gap."""


@dataclass(frozen=True)
class Candidate:
    """The best plan of one kind."""

    kind: str
    """Name of the kind in messages, such as `DDP`."""
    problem: Problem
    plan: Plan
    figure: Figure
    extrapolated: bool = False
    """Whether the profile has neither times for this microbatch size, nor for both a smaller and a larger size."""
    allowed: bool = True
    """Whether the candidate satisfies the user's constraints. A candidate that violates a constraint is only shown for
    comparison."""

    @property
    def cluster(self) -> Cluster:
        """The cluster that the candidate is planned for."""
        return self.problem.cluster

    @property
    def sharding(self) -> Sharding:
        """The state that the replicas divide among them."""
        return self.problem.options.sharding

    @property
    def sample_s(self) -> float:
        """Seconds per sample, by the figure."""
        return self.figure.step_s / self.problem.profile.minibatch

    @property
    def formula_sample_s(self) -> float:
        """Seconds per sample by the formulas."""
        return self.figure.formula_s / self.problem.profile.minibatch

    @property
    def updates(self) -> Updates:
        """Age of the candidate's gradients, and the samples that its updates average over."""
        return Updates.of(self.plan, self.problem.profile.minibatch)

    @property
    def delay(self) -> int:
        """Age of the candidate's oldest gradients, in updates; 0 for synchronous plans."""
        return 0 if self.plan.inference else max(self.updates.stale_by)

    @property
    def text(self) -> str:
        """Configuration, microbatch and throughput in a few words."""
        size = f"{self.problem.profile.minibatch}{EXTRAPOLATED if self.extrapolated else ''}"
        return f"{self.plan.config}, microbatch {size}: {show_throughput(1 / self.sample_s)}"

    def to_json(self) -> dict[str, Any]:
        """The fields that plan.json has for the candidate."""
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
    """(best plan by the formulas or None, lower bound on all plans in seconds per microbatch) of a problem.

    Plans that take `useful_s` seconds per microbatch or more by the formulas are not searched for. If there are many
    cuts, a `gap` of 0 searches all of them. Otherwise only cuts between repeated blocks are searched, and the bound is
    the result of `least_step_s`.
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


def improved(one: Candidate, search: PlanSearch) -> Candidate:
    """The best plan near a candidate by the figure; the candidate itself if no plan near it is faster."""
    found = search.climb(FiguredPlan(one.plan, evaluate(one.plan, one.problem), one.figure))
    return replace(one, plan=found.plan, figure=found.figure)


def with_rounded_gradients(one: Candidate, deadline: Deadline) -> Candidate:
    """A plan of data parallelism whose workers exchange gradients in bfloat16, as by `launch.sh --compress bf16`."""
    problem = replace(one.problem, cluster=with_halved_gradients(one.cluster))
    found = figured(one.plan, evaluate(one.plan, problem), problem, deadline)
    return replace(one, kind=ROUNDED, problem=problem, figure=found.figure)


def _never_fits(problem: Problem) -> bool:
    """Whether the whole model exceeds the largest device even if all workers divide as much state as possible."""
    whole = plain_data_parallel(problem, problem.cluster.workers)
    again = replace(whole, stages=(replace(whole.stages[0], recompute=True),))
    ways = (whole, again) if problem.options.recompute else (whole,)
    most = max(problem.memory_of([worker]) for worker in range(problem.cluster.workers))
    return all(worker_memory(one, problem, 0)[0] > most for one in ways)


def least_step_s(problem: Problem) -> float:
    """Lower bound on every plan's seconds per microbatch: the time if all workers compute without pause."""
    return max(problem.work_s / problem.cluster.total_speed, contention.least_step_time_of_shared_cores_s(problem))


def fastest_found(kind: str, search: PlanSearch) -> list[Candidate]:
    """The plans that a search has simulated and that are within the tolerance of its fastest plan."""
    least_s = min((one.step_s for one in search.found.values()), default=0.0)
    found = (one for one in search.found.values() if one.step_s <= least_s * (1 + TOLERANCE))
    return [Candidate(kind, search.problem, one.plan, one.figure) for one in found]


def like(plan: Plan, kind: str, search: PlanSearch) -> list[Candidate]:
    """The best plans near the plan with the stages of `plan`, which has another schedule or microbatch size.

    The result is empty if the stages do not fit in memory."""
    one = search.like(plan)
    return [] if one is None else [Candidate(kind, search.problem, one.plan, one.figure)]


def virtual_candidate(problem: Problem, deadline: Deadline, useful_s: float = float("inf")) -> Candidate | None:
    """The best plan of a schedule whose workers run several stages each.

    The result is None if no plan fits, none is found in time, or none seems to take less than `useful_s` seconds per
    microbatch.
    """
    try:
        plans = search_virtual(problem, deadline, useful_s).plans
    except (InfeasibleError, InputError, NotFoundInTimeError):
        return None
    if not plans:
        return None
    return Candidate(problem.options.schedule, problem, plans[0].plan, plans[0].figure)


def under(schedule: str, one: Candidate) -> Problem | None:
    """A candidate's problem under another schedule; None unless the candidate is a single pipeline of 1f1b-flush."""
    options = one.problem.options
    if len(one.plan.stages) == 1 or one.plan.copies > 1 or options.schedule != FLUSH:
        return None
    return replace(one.problem, options=replace(options, schedule=schedule))


def comparable(one: Candidate, start: Candidate) -> bool:
    """Whether both figures are simulated, or both come from the formulas.

    For 1f1b-flush, the formulas are a loose lower bound on the simulated time. For other schedules the bound is
    tighter. So comparing a simulated figure with a figure from the formulas would mislead.
    """
    return (one.figure.simulated_s is None) == (start.figure.simulated_s is None)


def stale_problems(question: Question, tolerated: float) -> Iterator[Problem]:
    """The problems whose plans may have gradients up to `tolerated` updates old.

    Only 2bw can train a given batch. 1f1b-stashing updates a stage after one microbatch of each replica, so the batch
    follows from the replicas.
    """
    options, size = question.options, question.minibatch or question.machines.profile.minibatch
    kinds: list[dict[str, Any]] = []
    if question.batch is None:
        kinds.append({"schedule": STASHING, "accumulate": None})
        if tolerated != ANY and options.stages is None:
            # In an unreplicated pipeline, the age of a stage's gradients is the number of stages behind it.
            kinds.append(kinds[0] | {"max_stages": min(int(tolerated) + 1, options.max_stages or 99)})
    if question.samples % size == 0:
        kinds.append({"schedule": DOUBLE_BUFFERED})
    for changes in kinds:
        try:
            yield question.problem(size, virtual_stages=options.virtual_stages, **changes)
        except InputError:
            continue


def best_of(found: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the most samples per second; None if there are no candidates."""
    return min(found, key=lambda one: one.sample_s, default=None)


def simplest_of(found: Sequence[Candidate]) -> Candidate:
    """The simplest candidate within the tolerance of the fastest candidate. `found` must not be empty."""
    limit_s = min(one.sample_s for one in found) * (1 + TOLERANCE)
    return min((one for one in found if one.sample_s <= limit_s), key=_effort)


def _effort(one: Candidate) -> tuple[int, int, int, int, int, float]:
    """A sort key that is smaller for simpler plans, and, among equally simple plans, for faster ones."""
    plan = one.plan
    servers = sum(len({one.cluster.server_of(worker) for worker in stage.workers}) for stage in plan.stages)
    last = max(worker for stage in plan.stages for worker in stage.workers)
    return _rank(one), plan.busy, len(plan.stages), servers, last, one.sample_s


def _rank(one: Candidate) -> int:
    if len(one.plan.stages) == 1:
        return 2 if one.sharding.divides_weights else int(one.sharding == Sharding.OPTIMIZER)
    return 3 if grid_shape_of(one.plan, one.cluster) or _uniform_by_device(one.plan, one.cluster) else 4


def _uniform_by_device(plan: Plan, cluster: Cluster) -> bool:
    """Whether the devices differ, and all stages on devices of one kind have the same number of replicas."""
    replicas: dict[Device, set[int]] = {}
    for stage in plan.stages:
        devices = {cluster.devices[worker] for worker in stage.workers}
        if len(devices) > 1 or (plan.accumulate or 0) % stage.replicas:
            return False
        replicas.setdefault(devices.pop(), set()).add(stage.replicas)
    different = len(set(cluster.devices)) > 1
    return different and plan.copies == 1 and all(len(counts) == 1 for counts in replicas.values())
