"""Finds plans whose workers run several stages each: `interleaved-1f1b` and `zb-v`.

For every number of positions, replicas and stages per worker, `virtual_cuts` looks for cuts, memory decides which
stages recompute, and the evaluator scores the plan. In the best few plans, single units are moved between stages as
long as the plan becomes faster. These plans are then simulated, with links that messages share, and the fastest is
taken. More plans are simulated if they are small. The search proves only a bound on all plans of this kind, which the
verdict states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeplan.cost import formulas
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.virtual_stages import PLACEMENTS, memory_of_device, with_depths
from pipeplan.errors import NO_PLAN_IN_TIME, InfeasibleError, InputError, NotFoundInTimeError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import INTERLEAVED
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.figure import Figure, FiguredPlan, by_updates_s, lengths_of_updates
from pipeplan.planning.virtual_stages.virtual_cuts import Places, VirtualShape, all_cuts, cuts_to_try, quick_estimate_s
from pipeplan.problem.problem import Problem
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.simulate import UPDATES
from pipeplan.util.deadline import NO_DEADLINE, Deadline, OutOfTime

MOST_CHUNKS = 6
"""Largest number of stages per worker that is tried if the user gives none."""
EVALUATED, MORE_EVALUATED, MORE_S = 12, 48, 2.0
"""Number of shapes for which a plan is made. Shapes with the shortest batches by a quick estimate, which ignores shared
cards, come first. The larger number applies during the first `MORE_S` seconds, but at most a tenth of the time."""
SIMULATED, MORE_PASSES = 4, 20_000
"""Number of plans that are simulated. Plans with the shortest batches by the formulas come first. Further plans that
may be the fastest follow until all simulations together have had `MORE_PASSES` passes."""
NEAR = 0.25
"""Largest relative excess over the shortest time by the formulas for which a plan is simulated."""
MOVES_S = 3.0
"""Time limit for moving single units of one plan between its stages, in seconds."""
LEAST_MOVE = 1e-3
"""Smallest relative gain for which a unit is moved."""


@dataclass(frozen=True)
class VirtualPlans:
    """The plans that a search found, best first, and a bound."""

    plans: tuple[FiguredPlan, ...]
    """The plans, best first; empty if no plan seems to be useful."""
    bound_s: float
    """Lower bound on the step time of every plan of the shapes that were tried, in seconds per minibatch."""


def search_virtual(problem: Problem, deadline: Deadline = NO_DEADLINE, useful_s: float = float("inf")) -> VirtualPlans:
    """The best plans of the problem's schedule whose workers run several stages each.

    Plans that take `useful_s` seconds per minibatch or more are of no use, so little time is spent on them.

    Raises `InfeasibleError` if no plan fits, `NotFoundInTimeError` if none was found before the deadline, and
    `InputError` for options that such plans cannot satisfy.
    """
    _refuse_options(problem)
    found: list[tuple[Plan, Evaluation]] = []
    accumulate, fitting, best_s = problem.options.accumulate or 1, 0, float("inf")
    shapes = list(virtual_shapes(problem))
    bound_s = min((_bound_s(problem, shape) for shape in shapes), default=0.0)
    shapes.sort(key=lambda shape: quick_estimate_s(problem, shape, _rounds(problem, shape)) / accumulate)
    quick = deadline.share(0.1, MORE_S)
    for shape in shapes:
        more = best_s <= useful_s * (1 + NEAR) and not quick.passed
        if deadline.passed or fitting >= (MORE_EVALUATED if more else EVALUATED):
            break
        if _bound_s(problem, shape) > min(best_s, useful_s):
            continue
        own = _plans_of(problem, shape)
        found, fitting = found + own, fitting + bool(own)
        best_s = min([best_s, *(score.step_time_s for _, score in own)])
    if not found:
        if shapes and deadline.passed:
            raise NotFoundInTimeError(NO_PLAN_IN_TIME)
        raise InfeasibleError(_why_none(problem, shapes))
    found.sort(key=lambda one: one[1].step_time_s)
    figured = _figured(found, problem, deadline, useful_s)
    figured.sort(key=lambda one: (one.figure.simulated_s is None, one.figure.simulated_s or one.figure.formula_s))
    return VirtualPlans(tuple(figured), bound_s)


def _figured(
    found: list[tuple[Plan, Evaluation]], problem: Problem, deadline: Deadline, useful_s: float
) -> list[FiguredPlan]:
    """The plans that seem to be the fastest, with their figures. `found`: plans, the fastest by the formulas first."""
    limit_s, passes = min(found[0][1].step_time_s, useful_s) * (1 + NEAR), 0
    figured: list[FiguredPlan] = []
    for number, (plan, score) in enumerate(found):
        if number < SIMULATED:
            if score.step_time_s > limit_s:
                continue
            plan, score = _moved(plan, score, problem, deadline.share(0.3, MOVES_S))
        elif passes >= MORE_PASSES or score.step_time_s >= min([useful_s, *(one.step_s for one in figured)]):
            break
        figure = _figure(plan, score, problem, deadline)
        passes += figure.minibatches * problem.passes * len(plan.stages)
        figured.append(FiguredPlan(plan, score, figure))
    return figured


def _moved(plan: Plan, score: Evaluation, problem: Problem, deadline: Deadline) -> tuple[Plan, Evaluation]:
    """The plan after moves of units between neighbouring stages that make it faster."""
    improved = True
    while improved and not deadline.passed:
        improved = False
        for moved in _neighbours(plan, problem):
            if deadline.passed:
                break
            fitting = fitted(moved, problem) if satisfies_options(moved, problem) else None
            other = None if fitting is None else evaluate(fitting, problem)
            if fitting is not None and other is not None and other.step_time_s < score.step_time_s * (1 - LEAST_MOVE):
                plan, score, improved = fitting, other, True
                break
    return plan, score


def _neighbours(plan: Plan, problem: Problem) -> Iterator[Plan]:
    """The plans that result from moving one unit over one of the plan's cuts."""
    ends, position = [0], {unit.layers[0]: index for index, unit in enumerate(problem.units)}
    for stage in plan.stages:
        ends.append(ends[-1] + sum(name in position for name in stage.layers))
    shape = VirtualShape(plan.schedule, len(plan.devices), len(plan.stages) // len(plan.devices), len(plan.devices[0]))
    for index in range(1, len(ends) - 1):
        for move in (-1, 1):
            if ends[index - 1] < ends[index] + move < ends[index + 1]:
                yield plan_at(problem, shape, (*ends[1:index], ends[index] + move, *ends[index + 1 : -1]))


def _figure(plan: Plan, score: Evaluation, problem: Problem, deadline: Deadline) -> Figure:
    """The figure of a plan, simulated from the end of its first update to the end of its second.

    The plan is not simulated if the deadline comes first or the plan is too large.
    """
    scenario = scenario_of_plan(plan, problem, score)
    lengths = lengths_of_updates(scenario, plan)
    try:
        simulated_s = by_updates_s(scenario, lengths, deadline) if lengths else None
    except OutOfTime:
        simulated_s = None
    if simulated_s is None:
        return Figure(score.step_time_s, note="no time was left to simulate it")
    return Figure(score.step_time_s, simulated_s, UPDATES * sum(lengths))


def virtual_shapes(problem: Problem) -> Iterator[VirtualShape]:
    """All shapes that the options allow, with two or more stages on a worker."""
    options, units = problem.options, len(problem.units)
    most = min(problem.cluster.workers, options.max_workers or problem.cluster.workers)
    for devices in range(1, min(most, units // 2) + 1):
        for replicas in range(1, min(most // devices, options.max_replicas or most) + 1):
            for chunks in _numbers_of_chunks(problem, devices):
                shape = VirtualShape(options.schedule, devices, chunks, replicas)
                most_stages = min(units, options.stages or units, options.max_stages or units)
                if (
                    shape.stages <= most_stages
                    and options.stages in (None, shape.stages)
                    and _is_useful(problem, shape)
                ):
                    yield shape


def _numbers_of_chunks(problem: Problem, devices: int) -> range:
    if problem.options.schedule != INTERLEAVED:
        return range(2, 3)
    given = problem.options.virtual_stages
    return range(given, given + 1) if given else range(2, min(MOST_CHUNKS, len(problem.units) // devices) + 1)


def _is_useful(problem: Problem, shape: VirtualShape) -> bool:
    """Whether every replica has a minibatch of an update, and several positions exist if several workers do."""
    return shape.replicas <= (problem.options.accumulate or 1) and (shape.devices > 1 or problem.cluster.workers == 1)


def _bound_s(problem: Problem, shape: VirtualShape) -> float:
    """Lower bound on the step time of all plans of a shape. The busiest replica has at least an equal share of the
    work, and at least the largest unit.
    """
    accumulate = problem.options.accumulate or 1
    fastest = max(device.speed for device in problem.cluster.devices)
    largest = max(unit.forward_s + unit.backward_s for unit in problem.units)
    return _rounds(problem, shape) * max(problem.work_s / shape.devices, largest) / fastest / accumulate


def _plans_of(problem: Problem, shape: VirtualShape) -> list[tuple[Plan, Evaluation]]:
    """The plans of a shape that fit, with recomputation where memory requires it: all plans, or the fastest by the
    formulas if there are many.
    """
    rounds = _rounds(problem, shape)
    every = all_cuts(problem, shape)
    plans = [
        fitted(plan_at(problem, shape, places), problem) for places in every or cuts_to_try(problem, shape, rounds)
    ]
    scored = [(plan, evaluate(plan, problem)) for plan in plans if plan is not None]
    return scored if every else sorted(scored, key=lambda one: one[1].step_time_s)[:1]


def _rounds(problem: Problem, shape: VirtualShape) -> int:
    """Minibatches of one update on the replica with the most minibatches."""
    return int(formulas.rounds(problem.options.accumulate or 1, shape.replicas))


def plan_at(problem: Problem, shape: VirtualShape, places: Places) -> Plan:
    """The plan of a shape with cuts at these places."""
    ends, placement = [0, *places, len(problem.units)], PLACEMENTS[shape.schedule]
    stages = []
    for stage in range(shape.stages):
        units = problem.units[ends[stage] : ends[stage + 1]]
        first = placement.device_of(stage, shape.devices) * shape.replicas
        layers = tuple(name for unit in units for name in unit.layers)
        stages.append(Stage(layers, tuple(range(first, first + shape.replicas)), 1, 1))
    return with_depths(Plan(tuple(stages), schedule=shape.schedule, accumulate=problem.options.accumulate))


def fitted(plan: Plan, problem: Problem) -> Plan | None:
    """The plan with recomputation only where memory requires it; None if even recomputing all stages does not fit."""
    if _excess(plan, problem) and not problem.options.recompute:
        return None
    everywhere = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    if _excess(plan, problem) and _excess(everywhere, problem):
        return None
    while over := _excess(plan, problem):
        stages = list(plan.stages)
        for workers in dict.fromkeys(stages[index].workers for index in over):
            own = [index for index in over if stages[index].workers == workers and not stages[index].recompute]
            worst = max(own, key=lambda index: over[index])
            stages[worst] = replace(stages[worst], recompute=True)
        plan = replace(plan, stages=tuple(stages))
    return plan


def _excess(plan: Plan, problem: Problem) -> dict[int, float]:
    """By stage, the bytes of its minibatches in flight, for all stages whose workers lack memory."""
    if not problem.options.memory:
        return {}
    found: dict[int, float] = {}
    for workers in plan.devices:
        memory, per_minibatch = memory_of_device(plan, problem, workers)
        if memory > problem.capacity_of(workers):
            found |= {index: minibatch * plan.stages[index].depth for index, minibatch in per_minibatch.items()}
    return found


def _refuse_options(problem: Problem) -> None:
    options = problem.options
    if options.grid:
        raise InputError(f"a plan of {options.schedule} is no uniform grid of stages: leave out --grid")
    if options.pins and options.stages is None:
        raise InputError(f"with {options.schedule}, --pin also needs the number of stages: give --stages")


def _why_none(problem: Problem, shapes: list[VirtualShape]) -> str:
    schedule = problem.options.schedule
    if shapes:
        return f"no plan of {schedule} fits in memory: more workers, smaller minibatches or another schedule may"
    least = (problem.options.virtual_stages or 2) * 2
    return (
        f"{schedule} needs at least two workers and {least} layers to cut between, and the model has "
        f"{len(problem.units)} on {problem.cluster.workers} workers"
    )
