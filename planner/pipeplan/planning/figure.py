"""The figure of a plan: the simulated time of its schedule, in seconds per microbatch.

Plans are compared, chosen and printed by this figure. The solvers' formulas are its lower bound, and stand in for it
where a simulation takes too long. A plan that divides the weights has the time of its recurrence instead
(`cost/sharded_data_parallel.py`). A plan is simulated for a number of microbatches that depends on it alone, and the
result is remembered, so that a plan has the same figure wherever it is named.

The simplest plan within 3% of the fastest is taken. Data parallelism is simplest: plain, then with a divided optimiser,
then with divided weights. A uniform pipeline, which has the same number of replicas in every stage, or in all stages on
one kind of device, is simpler than one of unequal replicas. Of two plans of one kind the one with fewer busy workers is
simpler, then the one with fewer stages, then the one whose stages lie in fewer servers, then the one whose idle workers
come last.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pipeplan.cluster_data.cluster import Cluster, Device
from pipeplan.cost.evaluate import Evaluation
from pipeplan.cost.stage_times import grid_shape_of
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.metrics import enough_minibatches, round_length
from pipeplan.simulation.scenario import Scenario
from pipeplan.simulation.simulate import UPDATES, simulated_update_s, steady_step_s, with_update
from pipeplan.util.deadline import Deadline, OutOfTime

TOLERANCE = 0.03
"""Relative. A plan that is simpler, or has newer gradients, is taken if it is at most this much slower than another."""


class Comparable(Protocol):
    """A plan on a cluster, with a figure by which it is compared."""

    @property
    def plan(self) -> Plan: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def sample_s(self) -> float: ...
    @property
    def sharding(self) -> Sharding: ...


Some = TypeVar("Some", bound=Comparable)


def simplest_of(found: Iterable[Some]) -> Some:
    """The simplest of the plans within the tolerance of the fastest one. There must be at least one."""
    plans: Sequence[Some] = list(found)
    limit_s = min(one.sample_s for one in plans) * (1 + TOLERANCE)
    return min((one for one in plans if one.sample_s <= limit_s), key=_effort)


def _effort(one: Comparable) -> tuple[int, int, int, int, int, float]:
    """A key that is less for simpler plans, and for faster ones of equal simplicity."""
    plan = one.plan
    servers = sum(len({one.cluster.server_of(worker) for worker in stage.workers}) for stage in plan.stages)
    last = max(worker for stage in plan.stages for worker in stage.workers)
    return _rank(one), plan.busy, len(plan.stages), servers, last, one.sample_s


def _rank(one: Comparable) -> int:
    if len(one.plan.stages) == 1:
        return 2 if one.sharding.divides_weights else int(one.sharding == Sharding.OPTIMIZER)
    return 3 if grid_shape_of(one.plan, one.cluster) or _uniform_by_device(one.plan, one.cluster) else 4


def _uniform_by_device(plan: Plan, cluster: Cluster) -> bool:
    """Whether devices differ, and all stages on devices of one kind have the same number of replicas."""
    replicas: dict[Device, set[int]] = {}
    for stage in plan.stages:
        devices = {cluster.devices[worker] for worker in stage.workers}
        if len(devices) > 1 or (plan.accumulate or 0) % stage.replicas:
            return False
        replicas.setdefault(devices.pop(), set()).add(stage.replicas)
    different = len(set(cluster.devices)) > 1
    return different and plan.copies == 1 and all(len(counts) == 1 for counts in replicas.values())


USUAL_PASSES = 1_000
"""Passes of microbatches through stages, forward and backward, up to which a plan is simulated for as many microbatches
as `pipeplan simulate` does. With shared cards a thousand passes take 0.1 to 0.6 seconds."""
MOST_PASSES = 4_000
"""The most passes of one simulation of the steady state. A plan that needs more is simulated for two updates."""
MOST_PASSES_OF_UPDATES = 48_000
"""The most passes of simulations of two updates, of one to two seconds. A larger plan has the formula's figure."""
LEAST_TURNS = 5
"""The least length of a simulation, as a multiple of the microbatches in flight."""
LEAST_FLUSHES = 3
"""The least number of updates before and after the steady part of a simulation with a flush."""
LEAST_UPDATE = 2
"""The least length of a shortened update, as a multiple of the microbatches in flight."""
TOO_FEW = "too few microbatches for a steady state"
REMEMBERED = 512
"""The number of simulations that are remembered."""


@dataclass(frozen=True)
class Figure:
    """The step time of a plan."""

    formula_s: float
    """Seconds per microbatch by the formulas: a lower bound."""
    simulated_s: float | None = None
    """Simulated seconds per microbatch; None where the plan was not simulated."""
    minibatches: int = 0
    """Microbatches that were simulated."""
    note: str = ""
    """Why the plan was not simulated; empty if it was, or if nobody asked for it."""

    @property
    def step_s(self) -> float:
        """The step time: simulated, and at least that of the formulas.

        Replays of plans without a flush were never faster than the formulas, although a simulation may be
        (docs/evidence/replay.md).
        """
        return self.formula_s if self.simulated_s is None else max(self.simulated_s, self.formula_s)

    @property
    def ratio(self) -> float | None:
        """Simulated time over that of the formulas; None where there was no simulation."""
        return None if self.simulated_s is None or self.formula_s <= 0 else self.simulated_s / self.formula_s


@dataclass(frozen=True)
class FiguredPlan:
    """A plan with its cost and its figure."""

    plan: Plan
    score: Evaluation
    figure: Figure

    @property
    def step_s(self) -> float:
        """Seconds per microbatch."""
        return self.figure.step_s


def figured(
    plan: Plan, score: Evaluation, problem: Problem, deadline: Deadline, *, simulates: bool = True
) -> FiguredPlan:
    """A plan with its figure; by the formulas if `simulates` is False, or where a simulation takes too long."""
    return FiguredPlan(
        plan, score, figure_of(plan, score, problem, deadline) if simulates else Figure(score.step_time_s)
    )


def figure_of(plan: Plan, score: Evaluation, problem: Problem, deadline: Deadline) -> Figure:
    """The figure of a plan with this score. Its note says why it was not simulated."""
    if problem.options.sharding.divides_weights:
        return Figure(score.step_time_s, note="a recurrence over the units of the model")
    key = problem, plan
    known = _REMEMBERED.get(key)
    if known is not None:
        return known
    scenario = scenario_of_plan(plan, problem, score)
    count = affordable(scenario, plan)
    lengths = () if count is not None else lengths_of_updates(scenario, plan)
    if count is None and not lengths:
        return Figure(score.step_time_s, note="the plan is too large to simulate")
    try:
        if count is None:
            known = Figure(score.step_time_s, by_updates_s(scenario, lengths, deadline), UPDATES * sum(lengths))
        else:
            step_s = steady_step_s(scenario, count, deadline)
            known = Figure(score.step_time_s, step_s, count, "" if step_s is not None else TOO_FEW)
    except OutOfTime:
        return Figure(score.step_time_s, note="no time was left to simulate it")
    except InputError as error:
        return Figure(score.step_time_s, note=str(error))
    _remember(key, known)
    return known


def quick_step_s(plan: Plan, score: Evaluation, problem: Problem, deadline: Deadline) -> float:
    """About the figure of a plan, in seconds per microbatch, from a simulation of two updates.

    It is the figure itself where that takes no longer, as for plans without a flush, and where it is known.
    """
    if problem.options.flushes and (problem, plan) not in _REMEMBERED:
        scenario = scenario_of_plan(plan, problem, score)
        if affordable(scenario, plan) is not None:
            try:
                return max(simulated_update_s(scenario, deadline) / (scenario.accumulate or 1), score.step_time_s)
            except (OutOfTime, InputError):
                return score.step_time_s
    return figured(plan, score, problem, deadline).step_s


_Key = tuple[Problem, Plan]
_REMEMBERED: OrderedDict[_Key, Figure] = OrderedDict()


def _remember(key: _Key, figure: Figure) -> None:
    _REMEMBERED[key] = figure
    while len(_REMEMBERED) > REMEMBERED:
        _REMEMBERED.popitem(last=False)


def affordable(scenario: Scenario, plan: Plan) -> int | None:
    """The microbatches to simulate: as many as `pipeplan simulate` does, or as the usual passes allow.

    None if those of a steady state take more than `MOST_PASSES`. The number depends on the plan alone.
    """
    count, length, group = enough_minibatches(scenario), round_length(scenario), scenario.accumulate
    if scenario.drains and group:
        # A whole round is left behind the updates at the start, of which there are fewer where half of all is less.
        until_last = max((LEAST_FLUSHES - 1) * group + length, min(LEAST_FLUSHES * group + length, 2 * length))
        least = until_last + group
    else:
        least = LEAST_TURNS * scenario.in_flight + 2 * length
    least = min(count, least)
    passes = (1 if plan.inference else 2) * len(plan.stages)
    if passes * least > MOST_PASSES:
        return None
    return min(count, max(least, USUAL_PASSES // passes))


def lengths_of_updates(scenario: Scenario, plan: Plan) -> tuple[int, ...]:
    """The updates, in microbatches, whose simulation tells how long an update of a large plan with a flush takes.

    Once the pipeline is full, a schedule repeats after as many microbatches as all replica counts divide. So two short
    updates, which leave the same remainder as the plan's own, show the time of every further round. Where these are no
    shorter, it is the plan's own update. Empty where even that takes more than `MOST_PASSES_OF_UPDATES`.
    """
    group = scenario.accumulate
    if not (scenario.drains and group):
        return ()
    if scenario.stages[0].shares:
        return (group,) if group <= MOST_PASSES_OF_UPDATES // (2 * UPDATES) else ()
    turn = math.lcm(*(stage.replicas for stage in scenario.stages)) * (len(plan.devices) if plan.virtual else 1)
    least = LEAST_UPDATE * scenario.in_flight
    short = least + (group - least) % turn
    longer = short + turn * math.ceil(scenario.in_flight / turn)
    most = MOST_PASSES_OF_UPDATES // (2 * len(plan.stages) * UPDATES)
    if short + longer < group and not (plan.virtual and group <= most):
        return (short, longer) if short + longer <= most else ()
    return (group,) if group <= most else ()


def by_updates_s(scenario: Scenario, lengths: Sequence[int], deadline: Deadline) -> float:
    """Seconds per microbatch of a plan with a flush, from simulations of updates of these lengths."""
    group, times = scenario.accumulate or 1, [simulated_update_s(with_update(scenario, n), deadline) for n in lengths]
    if len(lengths) == 1:
        return times[0] / group
    # Stages before the slowest one run ahead until as many microbatches are in flight as they may have.
    slowest_s = max((stage.forward_s + stage.backward_s) / stage.replicas for stage in scenario.stages)
    further_s = max((times[1] - times[0]) / (lengths[1] - lengths[0]), slowest_s)
    return (times[1] + further_s * (group - lengths[1])) / group
